"""Tokenizer and chat template of a model folder, on a small tokenizer made here."""

import json
import random

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


def test_the_template_of_a_processor_of_images_goes_before_that_of_the_tokenizer(tmp_path):
    folder = make_folder(tmp_path / "a", None, chat_template="of the tokenizer")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    assert ModelText(folder).render_chat([]) == "of the processor"
    (folder / "chat_template.jinja").write_text("of today")
    assert ModelText(folder).render_chat([]) == "of today"


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


def test_a_broken_template_is_named_by_what_needs_it(tmp_path):
    text = ModelText(make_folder(tmp_path / "a", "{% for %}"))
    assert text.decode(text.encode("x")) == "x"
    for needs in (text.check_chat_template, lambda: text.render_chat([])):
        with pytest.raises(ValueError, match="does not parse"):
            needs()


def test_marks_for_a_trainers_loss_are_no_text(tmp_path):
    template = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    text = ModelText(make_folder(tmp_path / "a", template))
    assert text.render_chat([{"content": "a"}, {"content": "b"}]) == "ab"


def test_a_template_has_the_variables_that_transformers_passes(tmp_path):
    template = (
        "{{ 'T' if tools is not none }}{{ 'D' if documents is not none }}"
        "{{ 'G' if add_generation_prompt }}"
    )
    text = ModelText(make_folder(tmp_path / "a", template))
    assert text.render_chat([]) == "G"
    assert text.render_chat([], tools=[1], add_generation_prompt=False) == "T"


def test_needs_a_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        ModelText(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        ModelText(tmp_path)


def test_a_prompt_is_whole_whatever_the_folder_was_trained_with(tmp_path):
    """Trainers save the limits of their batches with the tokenizer."""
    folder = make_folder(tmp_path / "a")
    saved = Tokenizer.from_file(str(folder / "tokenizer.json"))
    saved.enable_truncation(max_length=8)
    saved.enable_padding(length=8, pad_id=0, pad_token="!")
    saved.save(str(folder / "tokenizer.json"))
    text = ModelText(folder)
    assert text.decode(text.encode("words " * 10)) == "words " * 10
    assert len(text.encode("hi")) == 2


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


def text_of(tokenizer, folder):
    tokenizer.save(str(folder / "tokenizer.json"))
    return ModelText(folder)


@pytest.fixture
def merged_text(tmp_path):
    """A byte-level tokenizer with tokens that end in one character and begin in another."""
    alphabet = dict(zip(bytes_to_characters(), range(256), strict=True))
    characters = list(alphabet)
    raw = "€é🙂 日a\N{REPLACEMENT CHARACTER}€🙂é".encode()
    for size in (2, 3, 4, 5):
        for begin in range(len(raw) - size):
            token = "".join(characters[byte] for byte in raw[begin : begin + size])
            alphabet.setdefault(token, len(alphabet))
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return text_of(tokenizer, tmp_path)


def bytes_to_characters():
    """The byte alphabet in the order of its bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


@pytest.fixture
def fallback_text(tmp_path):
    """Tokens for bytes beside tokens for words, as in Llama 2's vocabulary."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {"▁a": 256, "b": 257, "▁": 258, "é": 259}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return text_of(tokenizer, tmp_path)


def streamed(text, ids, size=1):
    stream = text.stream()
    pieces = [stream.push(ids[begin : begin + size]) for begin in range(0, len(ids), size)]
    return "".join([*pieces, stream.finish()])


def test_stream_is_the_whole_text_whatever_the_bytes(merged_text):
    rng = random.Random(5)
    fragments = list("€🙂é日".encode())  # Characters often nearly come about.
    known = range(128, merged_text.encode("</s>")[0])
    for _ in range(2000):
        pool = known if rng.random() < 0.5 else [*fragments, *rng.choices(known, k=2)]
        ids = rng.choices(pool, k=rng.randint(1, 14))
        assert streamed(merged_text, ids, rng.randint(1, 3)) == merged_text.decode(ids)


def test_stream_is_the_whole_text_with_byte_fallback(fallback_text):
    rng = random.Random(6)
    parts = [*(list(c.encode()) for c in "€🙂é日"), [256], [257], [258], [259]]
    for _ in range(1000):
        ids = [i for part in rng.choices(parts, k=rng.randint(1, 8)) for i in part]
        assert streamed(fallback_text, ids) == fallback_text.decode(ids)


def test_stream_shows_characters_that_tokens_hold_in_part(merged_text):
    """Not only once a token happens to end where a character does."""
    (across,) = (
        i for i in range(256, 400) if merged_text.token_bytes(i) == "€".encode()[1:] + b"\xc3"
    )
    stream = merged_text.stream()
    euro = list("€".encode())
    assert stream.push(euro[:1]) == "" and stream.push([across]) == "€"
    assert stream.push([0xA9]) == "é"


@pytest.mark.parametrize("byte", [0x80, 0xE2, 0xF0])
@pytest.mark.parametrize("kind", ["merged_text", "fallback_text"])
def test_stream_takes_bytes_that_are_no_text_as_fast_as_any(kind, byte, request, monkeypatch):
    text = request.getfixturevalue(kind)
    decoded, decode = [], text.decode

    def counted(token_ids, **options):
        decoded.append(len(token_ids))
        return decode(token_ids, **options)

    monkeypatch.setattr(text, "decode", counted)
    work = {}
    for count in (200, 2000):
        decoded.clear()
        assert streamed(text, [byte] * count) == "\N{REPLACEMENT CHARACTER}" * count
        work[count] = sum(decoded)
    assert work[2000] < 11 * work[200]


def test_stream_gives_up_a_character_that_special_tokens_interrupt(text):
    stream = text.stream()
    euro = [text.encode("€")[0]]
    assert [stream.push(ids) for ids in (euro, [258], [258])] == ["", "", ""]
    assert stream.push([258]) == "\N{REPLACEMENT CHARACTER}"


def test_json_in_templates_is_not_escaped_for_html(tmp_path):
    text = ModelText(make_folder(tmp_path / "a", "{{ messages | tojson }}"))
    assert text.render_chat([{"role": "<é>"}]) == '[{"role": "<é>"}]'


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_stream_ends_at_the_first_stop_string(text, size):
    words = "naïve 日本語 🙂 words\nand more"
    ids = text.encode(words, special_tokens=False)
    for stop, include, wanted in [
        (["\n"], False, "naïve 日本語 🙂 words"),
        (["\n"], True, "naïve 日本語 🙂 words\n"),
        (["words\nand", "語 "], False, "naïve 日本"),
        (["absent", "moreover"], False, words),
    ]:
        stream = text.stream(stop=stop, include_stop=include)
        parts = [stream.push(ids[i : i + size]) for i in range(0, len(ids), size)]
        assert "".join(parts) + stream.finish() == wanted
        assert stream.stopped == (None if wanted == words else stop[-1])
        counted = text.decode(ids[: stream.count])
        assert counted.startswith(wanted) and stream.count <= len(ids)
        if stream.stopped is not None:
            assert stream.stopped in counted
            assert stream.stopped not in text.decode(ids[: stream.count - 1])
            assert stream.push([40]) == "" and stream.finish() == ""


def test_what_could_begin_a_stop_string_is_shown_at_the_end(text):
    stream = text.stream(stop=["bcd"])
    ids = [text.encode(c, special_tokens=False)[0] for c in "abc"]
    assert [stream.push([i]) for i in ids] == ["a", "", ""]
    assert stream.finish() == "bc" and stream.stopped is None and stream.count == 3


def test_none_of_the_first_min_tokens_completes_a_stop_string(text):
    ids = [text.encode(c, special_tokens=False)[0] for c in "xyxy"]
    stream = text.stream(stop=["xy"], min_tokens=2)
    assert stream.push(ids) == "xy" and stream.count == 4


@pytest.mark.parametrize(
    ("stop", "error"), [("\n", "must be a list"), ([""], "at least one character")]
)
def test_stop_strings_of_the_wrong_kind_are_refused(text, stop, error):
    with pytest.raises((TypeError, ValueError), match=error):
        text.stream(stop=stop)
