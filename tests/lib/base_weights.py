"""Tests' looks at a base model: its files, equal tensors, and what a server samples from it."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from lib.server import Server
from lib.wire import RAW

PROMPT = [11, 12, 13, 14, 15]


def in_files(model: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in model.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    left, right = left.cpu(), right.cpu()
    return left.dtype == right.dtype and torch.equal(left, right)


def greedy(server: Server):
    (sample,) = server.wire.generate(
        PROMPT, temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=RAW
    )
    return sample.tokens, list(sample.logprobs)
