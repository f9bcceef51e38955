"""The tier of a layer's compose: fused with its backward, fused forward only, or eager."""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Iterator
from typing import NamedTuple

import torch

from dorad.train import _native

VARIABLE = "DORAD_TRAIN_TIER"


class Tier(enum.StrEnum):
    """A way to compute the compose."""

    FUSED_BACKWARD = "fused_backward"  # one pass each way; saves one tensor for the backward
    FUSED_FORWARD = "fused_forward"  # one pass, no autograd
    EAGER = "eager"  # plain torch operations


class LayerTier(NamedTuple):
    """The tier of a layer, and why."""

    tier: Tier | None
    """None: the layer is PEFT's."""
    reason: str


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


# CPU: up to these sizes, the calls around the operations cost more than what they save.
_SMALL_WEIGHT = 256 * 1024
_SMALL_OUTPUT = 128 * 1024


def is_small(device: torch.device, outputs: int, weights: int = 0) -> bool:
    """Whether plain operations, as PEFT's, are at least as fast with so many elements.

    Not if a tier is asked for.
    """
    return (
        device.type == "cpu"
        and outputs <= _SMALL_OUTPUT
        and weights <= _SMALL_WEIGHT
        and _choice == Choice.AUTO
    )


def choose(
    rows: int,
    out: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    training: bool,
) -> LayerTier:
    """The tier of a compose alone, to [rows, out] of `dtype`. `training`: autograd records it."""
    reason = why_eager(device, dtype)
    if reason is None and _choice == Choice.AUTO:
        if device.type == "cuda":
            small = training and rows * out < _CUDA_MIN_ELEMENTS
        else:
            small = rows * out < _CPU_MIN_ELEMENTS
        if small:
            reason = "its output is small"
    if reason is not None:
        return LayerTier(Tier.EAGER, reason)
    return LayerTier(_fused(training), "its compose is one pass each way")


def whole_tier(training: bool) -> LayerTier:
    """Of a linear as one function: more calls are not faster where `is_small` is false."""
    return LayerTier(_fused(training), "it is one function")


def why_eager(device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why nothing is fused, if any."""
    if _choice == Choice.EAGER:
        return "the tier is set to eager"
    if device.type == "cuda":
        if dtype not in _native.TYPES:
            return f"CUDA has no kernels for {dtype}"
        missing: str | None = _native.why_missing(device)
        return missing
    return None if device.type == "cpu" else f"there are no kernels for {device.type}"


def _fused(training: bool) -> Tier:
    return Tier.FUSED_BACKWARD if training else Tier.FUSED_FORWARD
