"""The steps of torch's optimizers in this process, and the parameters that they train."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim import optimizer
from torch.utils.weak import WeakIdKeyDictionary

_steps = 0
_watching = False
# The number of parameters of each optimizer that has made a step, and those parameters.
_optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
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
    size = sum(len(group["params"]) for group in made_by.param_groups)
    if _optimizers.get(made_by) != size:
        _optimizers[made_by] = size
        for group in made_by.param_groups:
            for parameter in group["params"]:
                _trained[parameter] = None


def count() -> int:
    """The number of steps since the first `watch`."""
    return _steps


def changes_in_steps(parameter: torch.Tensor) -> bool:
    """Whether an optimizer trains this parameter, and has made a step."""
    return parameter in _trained


def in_backward() -> bool:
    """Whether this thread computes gradients: a forward within is a repetition."""
    return torch._C._current_graph_task_id() != -1
