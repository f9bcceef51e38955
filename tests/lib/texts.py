"""A tokenizer for the tiny models: all bytes, some pairs, and tiny_models' special tokens."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from lib.tiny_models import VOCAB

TEMPLATE = (
    "{% if messages[0].role == 'nobody' %}{{ raise_exception('nobody speaks') }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{{ tone or 'assistant' }}: "
)
SPECIAL = ["<pad>", "<s>", "</s>"]


def make_tokenizer(
    folder: Path,
    special: Sequence[str] = SPECIAL,
    template: str = TEMPLATE,
    runs: Sequence[str] = (),
) -> Path:
    """Writes tokenizer.json and a chat template into a model's folder, and returns it.

    The first ids are special, then runs of characters, then one token for each byte, then merges of
    two letters. The second begins a text, the third ends one.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in "aeiou" for b in "nrstlmdc "]
    pairs = [(a, b.replace(" ", "Ġ")) for a, b in pairs][
        : VOCAB - len(special) - len(runs) - len(alphabet)
    ]
    tokens = [*special, *runs, *alphabet, *(a + b for a, b in pairs)]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens([AddedToken(run, normalized=False) for run in runs])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{special[1]} $A", special_tokens=[(special[1], 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": special[2]}))
    (folder / "chat_template.jinja").write_text(template)
    return folder
