"""The steps of torch's optimizers in this process, and the parameters that they train."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim import optimizer
from torch.utils.weak import WeakIdKeyDictionary


class _Steps:
    """Of an optimizer."""

    def __init__(self) -> None:
        self.count = 0
        self.parameters = 0


_steps = 0
_watching = False
# Those that have made a step, and their parameters.
_optimizers: weakref.WeakKeyDictionary[Any, _Steps] = weakref.WeakKeyDictionary()
_trained: Any = WeakIdKeyDictionary()


def watch() -> None:
    """Counts steps from here on."""
    global _watching
    if not _watching:
        _watching = True
        optimizer.register_optimizer_step_post_hook(_count)


def _count(made_by: Any, *_: object) -> None:
    global _steps
    _steps += 1
    own = _optimizers.setdefault(made_by, _Steps())
    own.count += 1
    size = sum(len(group["params"]) for group in made_by.param_groups)
    if own.parameters != size:
        own.parameters = size
        for group in made_by.param_groups:
            for parameter in group["params"]:
                _trained[parameter] = own


def count() -> int:
    """The number of steps since the first `watch`."""
    return _steps


def last(parameter: torch.Tensor) -> tuple[bool, int]:
    """Changes with each step of the optimizer that trains this parameter.

    Of one that no optimizer has, as in shards, with each step of any.
    """
    own = _trained.get(parameter)
    return (False, _steps) if own is None else (True, own.count)


def changes_in_steps(parameter: torch.Tensor) -> bool:
    """Whether an optimizer trains this parameter, and has made a step."""
    return parameter in _trained


def in_backward() -> bool:
    """Whether this thread computes gradients: a forward within is a repetition."""
    return torch._C._current_graph_task_id() != -1
