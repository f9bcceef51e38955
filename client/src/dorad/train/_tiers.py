"""The tier of a layer's compose: fused with its backward, fused forward only, or eager."""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Iterator

import torch

from dorad.train import _native

VARIABLE = "DORAD_TRAIN_TIER"


class Tier(enum.StrEnum):
    """A way to compute the compose."""

    FUSED_BACKWARD = "fused_backward"  # one pass each way; saves one tensor for the backward
    FUSED_FORWARD = "fused_forward"  # one pass, no autograd
    EAGER = "eager"  # plain torch operations


class Choice(enum.StrEnum):
    """The choice of a tier: by the measured crossovers, or by the caller."""

    AUTO = "auto"
    FUSED = "fused"
    EAGER = "eager"


def _from_environment() -> Choice:
    text = os.environ.get(VARIABLE, Choice.AUTO.value)
    try:
        return Choice(text)
    except ValueError:
        raise ValueError(f"{VARIABLE} must be one of {_names()}, not {text!r}") from None


def _names() -> str:
    return ", ".join(choice.value for choice in Choice)


# Per process, not per thread: checkpointing repeats a forward in autograd's threads, which must
# choose the same tier.
_choice = _from_environment()


@contextlib.contextmanager
def tier(name: str) -> Iterator[None]:
    """Within the block every compose of the process is "eager", or "fused" at any size, or "auto".

    fp64 on CUDA, embeddings and convolutions are always eager.
    """
    global _choice
    try:
        wanted = Choice(name)
    except ValueError:
        raise ValueError(f"a tier is one of {_names()}, not {name!r}") from None
    before, _choice = _choice, wanted
    try:
        yield
    finally:
        _choice = before


# Of a compose alone on CUDA, with gradients: fused is three launches, eager more than a dozen, so
# that only tiny sizes might gain nothing. No crossover has been measured yet.
_CUDA_MIN_ELEMENTS = 16 * 1024
# CPU: above this, allocating activations costs more than the calls for each chunk of rows.
_CPU_MIN_ELEMENTS = 1024 * 1024


def choose(
    rows: int,
    out: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    training: bool,
) -> Tier:
    """The tier of a compose alone, to [rows, out] of `dtype`. `training`: autograd records it."""
    fused = Tier.FUSED_BACKWARD if training else Tier.FUSED_FORWARD
    if _choice == Choice.EAGER:
        return Tier.EAGER
    if device.type == "cuda":
        if dtype not in _native.TYPES or _native.library is None:
            return Tier.EAGER
        if _choice == Choice.FUSED or not training:
            return fused
        return fused if rows * out >= _CUDA_MIN_ELEMENTS else Tier.EAGER
    if device.type == "cpu":
        large = _choice == Choice.FUSED or rows * out >= _CPU_MIN_ELEMENTS
        return fused if large else Tier.EAGER
    return Tier.EAGER


def choose_whole(*, device: torch.device, dtype: torch.dtype, training: bool) -> Tier:
    """The tier of a linear that is one function: more calls are not faster at any size.

    Eager on request, and on CUDA without a kernel.
    """
    if _choice == Choice.EAGER or device.type not in ("cpu", "cuda"):
        return Tier.EAGER
    if device.type == "cuda" and (dtype not in _native.TYPES or _native.library is None):
        return Tier.EAGER
    return Tier.FUSED_BACKWARD if training else Tier.FUSED_FORWARD
