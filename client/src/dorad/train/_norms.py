"""Norms and g of linears for the forwards between two optimizer steps.

They are the same in each: with gradient accumulation, and when checkpointing repeats a forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dorad.train import _steps

if TYPE_CHECKING:
    from dorad.train._linear import Parts


class _Kept(NamedTuple):
    key: tuple[object, ...]
    scales: torch.Tensor
    changes_in_steps: bool  # whether the parameters of all its linears do


# By the first linear's DoRA layer.
_kept: weakref.WeakKeyDictionary[Any, _Kept] = weakref.WeakKeyDictionary()


def kept(
    group: Sequence[Parts], key: tuple[object, ...] | None, *, recorded: bool
) -> torch.Tensor | None:
    """The scales that `keep` has for these linears and `key`, if any.

    Versions of tensors do not count what is written through `.data`, as loops without an optimizer
    do. So only a repetition has them, and a forward that autograd records of linears whose
    parameters change in an optimizer's steps.
    """
    found = _kept.get(group[0].dora)
    if found is None or found.key != key:
        return None
    usable = _steps.in_backward() or (recorded and found.changes_in_steps)
    return found.scales if usable else None


def _changes_in_steps(parts: Parts) -> bool:
    trained = [each for each in (parts.b, parts.a, parts.magnitude) if each.requires_grad]
    return bool(trained) and _steps.changes_in_steps(trained[0])


def keep(group: Sequence[Parts], key: tuple[object, ...] | None, scales: torch.Tensor) -> None:
    """Keeps the norms and g of these linears."""
    if key is not None:
        # The first step of an optimizer changes the key, too.
        _kept[group[0].dora] = _Kept(key, scales, all(map(_changes_in_steps, group)))


def key_of(group: Sequence[Parts], x: torch.Tensor) -> tuple[object, ...] | None:
    """Changes with whatever the norms and g of the linears depend on. None: nothing is kept."""
    if x.is_cuda:
        # A graph has its own: it runs again with other weights.
        if torch.cuda.is_current_stream_capturing():
            return None
        stream = torch._C._cuda_getCurrentRawStream(x.device.index)
    else:
        stream = 0
    key: list[object] = [_steps.count(), stream]
    for weight, _, a, b, magnitude, dora, scaling, _ in group:
        if dora.kept_norms() is not None:
            return None
        for tensor in (weight, a, b, magnitude):
            if tensor.is_inference():
                return None
            key += tensor.data_ptr(), tensor._version
        key += id(dora), scaling
    return tuple(key)
