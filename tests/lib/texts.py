"""A tokenizer for the tiny models: all bytes, some pairs, and tiny_models' special tokens."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from lib.tiny_models import VOCAB

TEMPLATE = (
    "{% if messages[0].role == 'nobody' %}{{ raise_exception('nobody speaks') }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{{ tone or 'assistant' }}: "
)
SPECIAL = ["<pad>", "<s>", "</s>"]


def make_tokenizer(folder: Path) -> Path:
    """Writes tokenizer.json and a chat template into a model's folder, and returns it.

    Ids 0 to 2 are special, then one token for each byte, then merges of two letters.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in "aeiou" for b in "nrstlmdc "]
    pairs = [(a, b.replace(" ", "Ġ")) for a, b in pairs][: VOCAB - len(SPECIAL) - len(alphabet)]
    tokens = [*SPECIAL, *alphabet, *(a + b for a, b in pairs)]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
