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
    if not _steps.in_backward() and not (recorded and all(map(_changes_in_steps, group))):
        return None
    found = _kept.get(group[0].dora)
    return found.scales if key is not None and found is not None and found.key == key else None


def _changes_in_steps(parts: Parts) -> bool:
    trained = [each for each in (parts.b, parts.a, parts.magnitude) if each.requires_grad]
    return bool(trained) and _steps.changes_in_steps(trained[0])


def keep(group: Sequence[Parts], key: tuple[object, ...] | None, scales: torch.Tensor) -> None:
    """Keeps the norms and g of these linears."""
    if key is not None:
        _kept[group[0].dora] = _Kept(key, scales)


def key_of(group: Sequence[Parts], x: torch.Tensor) -> tuple[object, ...] | None:
    """Changes with whatever the norms and g of the linears depend on. None: nothing is kept."""
    if x.is_cuda:
        # A graph has its own: it runs again with other weights.
        if torch.cuda.is_current_stream_capturing():
            return None
        stream = torch._C._cuda_getCurrentRawStream(x.device.index)
    else:
        stream = 0
    tensors = [each for part in group for each in (part.weight, part.a, part.b, part.magnitude)]
    if any(tensor.is_inference() for tensor in tensors) or any(
        part.dora.kept_norms() is not None for part in group
    ):
        return None
    return (
        _steps.count(),
        stream,
        *((tensor.data_ptr(), tensor._version) for tensor in tensors),
        *((id(part.dora), part.scaling) for part in group),
    )
