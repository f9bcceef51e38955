"""Whether a call may bypass torch's dispatcher."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

_PLAIN = {torch.Tensor, torch.nn.Parameter}


def transformed() -> bool:
    """Whether derivatives are taken that only plain operations have: torch.func, forward mode."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def watched(*tensors: torch.Tensor) -> bool:
    """Whether torch must see the operators on `tensors`: during compiling, tracing or transforms.

    A Python operator costs tens of microseconds a call, as much as its kernels; else the kernels
    are called directly.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or transformed()
        or torch._C._get_tracing_state() is not None
        or not plain(*tensors)
    )


def plain(*tensors: torch.Tensor) -> bool:
    """Whether they are tensors without operators of their own, and have memory."""
    for tensor in tensors:  # noqa: SIM110 - a generator takes longer
        if type(tensor) not in _PLAIN or tensor.is_meta:
            return False
    return True
