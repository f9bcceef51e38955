"""Tokenizer and chat template of a model folder, on a small tokenizer made here."""

import json

import pytest
from dorad.text import ModelText
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_folder(root, template=TEMPLATE, **config):
    """A byte-level tokenizer: token i is byte i of the byte alphabet, then three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|user|>", "<|assistant|>", "</s>"])
    root.mkdir(exist_ok=True)
    tokenizer.save(str(root / "tokenizer.json"))
    (root / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", **config}))
    if template is not None:
        (root / "chat_template.jinja").write_text(template)
    return root


@pytest.fixture
def text(tmp_path):
    return ModelText(make_folder(tmp_path / "model"))


def test_renders_the_chat_template(text):
    rendered = text.render_chat([{"role": "user", "content": "hi"}])
    assert rendered == "<|user|>hi</s>\n<|assistant|>"
    ids = text.encode_chat([{"role": "user", "content": "hi"}])
    assert text.decode(ids, skip_special_tokens=False) == rendered
    assert ids[0] == 256 and ids[-1] == 257  # Special tokens are single tokens.


def test_takes_the_template_from_tokenizer_config(tmp_path):
    folder = make_folder(tmp_path / "a", None, chat_template="A{{ messages[0].content }}")
    assert ModelText(folder).render_chat([{"role": "user", "content": "x"}]) == "Ax"
    named = [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
    folder = make_folder(tmp_path / "b", None, chat_template=named)
    assert ModelText(folder).render_chat([]) == "D"


def test_special_tokens_may_be_objects(tmp_path):
    folder = make_folder(tmp_path / "a", "{{ eos_token }}", eos_token={"content": "<e>"})
    assert ModelText(folder).render_chat([]) == "<e>"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('system first') }}", "system first"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_template_that_refuses_or_escapes_is_an_error(tmp_path, template, words):
    text = ModelText(make_folder(tmp_path / "a", template))
    with pytest.raises(ValueError, match=words):
        text.render_chat([])


def test_a_broken_template_is_named(tmp_path):
    with pytest.raises(ValueError, match="does not parse"):
        ModelText(make_folder(tmp_path / "a", "{% for %}"))


def test_needs_a_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        ModelText(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        ModelText(tmp_path)


def test_without_a_template_chat_is_refused(tmp_path):
    text = ModelText(make_folder(tmp_path / "a", None))
    assert not text.has_chat_template
    with pytest.raises(ValueError, match="no chat template"):
        text.encode_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("words", ["plain words", "naïve café", "日本語と🙂 emoji", ""])
def test_stream_pieces_join_to_the_whole(text, words):
    stream = text.stream()
    pieces = [stream.push([i]) for i in text.encode(words)] + [stream.finish()]
    assert "".join(pieces) == words
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_stream_shows_an_unfinished_character_at_the_end(text):
    stream = text.stream()
    ids = text.encode("é")
    assert stream.push(ids[:1]) == "" and stream.finish() == "\N{REPLACEMENT CHARACTER}"


def test_json_in_templates_is_not_escaped_for_html(tmp_path):
    text = ModelText(make_folder(tmp_path / "a", "{{ messages | tojson }}"))
    assert text.render_chat([{"role": "<é>"}]) == '[{"role": "<é>"}]'
