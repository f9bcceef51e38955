"""client/examples/grpo.py as a module, and a tiny model for it."""

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from lib.server import ROOT

EXAMPLE = ROOT / "client" / "examples" / "grpo.py"
TEMPLATE = "{% for m in messages %}<q>{{ m.content }}{% endfor %}<a>"


@contextmanager
def loaded() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("grpo", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["grpo"] = module  # Its dataclasses look there for their annotations.
    spec.loader.exec_module(module)
    yield module
    del sys.modules["grpo"]


def make_model(zoo, folder: Path) -> Path:
    """A bf16 checkpoint with a byte-level tokenizer and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(zoo.model("llama3"), folder)
    # As in the model, the first ids are special tokens.
    alphabet = ["<a>", "<q>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytewise = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    bytewise.add_special_tokens(["<a>", "<q>", "<end>"])
    PreTrainedTokenizerFast(
        tokenizer_object=bytewise, eos_token="<end>", chat_template=TEMPLATE
    ).save_pretrained(folder)
    return folder
