"""Linears that have the same input, such as q, k and v, as one call: the first computes for all.

They are found by what a forward does: linears that are called one after the other with the same
tensor. From then on the first one's call has the outputs of the others, which take theirs when they
are called.

Checkpointing repeats a forward and needs the same saved tensors. So with gradients a change of what
is known counts from the next optimizer step on, after which no earlier forward is repeated.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from dorad.train import _native, _steps

_MOST_FOLLOWERS = _native.MOST_LINEARS - 1
# After so many calls one after the other with unused outputs a linear computes for itself alone.
_MOST_UNUSED = 3


StateOf = Callable[[Any], tuple[object, ...]]
"""What may change of a module between two calls of a forward."""


class _Known:
    """What is known of a linear: those that are called after it with its input."""

    def __init__(self) -> None:
        self.active: tuple[weakref.ref[Any], ...] = ()  # with gradients
        self.learned: tuple[weakref.ref[Any], ...] = ()  # active from the next step on
        self.learned_at: object = None
        self.unused = 0

    def learn(self, followers: tuple[weakref.ref[Any], ...], step: object) -> None:
        self.learned, self.learned_at = followers, step

    def followers(self, step: object) -> list[Any]:
        if self.learned_at != step and not _steps.in_backward():
            self.active = self.learned
        now = self.active if torch.is_grad_enabled() else self.learned
        found = [each() for each in now]
        return [] if None in found else found


class _Call(NamedTuple):
    """A linear's call that others may follow."""

    x: weakref.ref[torch.Tensor]
    version: int
    mode: tuple[object, ...]
    first: weakref.ref[Any]
    known: _Known
    step: object


class _Output(NamedTuple):
    y: torch.Tensor
    state: tuple[object, ...]


class _Thread(threading.local):
    """The last call of this thread, and the outputs that its followers have not taken."""

    def __init__(self) -> None:
        self.call: _Call | None = None
        self.followers: list[Any] = []  # called since, or computed for, in order
        self.outputs: dict[int, _Output] = {}  # by the follower's id


_known: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()
_thread = _Thread()


def _mode(x: torch.Tensor) -> tuple[object, ...]:
    kind = x.device.type
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast


def _follows(x: torch.Tensor) -> bool:
    call = _thread.call
    return (
        call is not None and call.x() is x and call.version == _version(x) and call.mode == _mode(x)
    )


def _version(x: torch.Tensor) -> int:
    return -1 if x.is_inference() else x._version


def take(module: Any, x: torch.Tensor, state_of: StateOf) -> torch.Tensor | None:
    """The module's output that the first linear of x has computed, if its state is the same."""
    if not _thread.outputs:
        return None
    if not _follows(x):
        drop()
        return None
    output = _thread.outputs.pop(id(module), None)
    return output.y if output is not None and output.state == state_of(module) else None


def drop() -> None:
    """Forgets the last call, and counts it if one of its outputs was not used."""
    call, has_unused = _thread.call, bool(_thread.outputs)
    _thread.call, _thread.followers, _thread.outputs = None, [], {}
    if call is None:
        return
    known = call.known
    if known.unused < _MOST_UNUSED:
        known.unused = known.unused + 1 if has_unused else 0
        if known.unused == _MOST_UNUSED:
            known.learn((), call.step)


def begin(module: Any, x: torch.Tensor, step: object) -> list[Any]:
    """The modules whose outputs the call of `module` with x shall compute, too.

    Empty if it follows another call with x, which is remembered. `step` changes with each optimizer
    step.
    """
    call = _thread.call if _follows(x) else None
    first = None if call is None else call.first()
    if call is None or first is None or first is module or module in _thread.followers:
        if _thread.call is not None:
            drop()
        known = _known.get(module)
        if known is None:
            known = _known[module] = _Known()
        _thread.call = _Call(
            weakref.ref(x), _version(x), _mode(x), weakref.ref(module), known, step
        )
        return known.followers(step)
    if len(_thread.followers) < _MOST_FOLLOWERS:
        _thread.followers.append(module)
        known, found = call.known, tuple(map(weakref.ref, _thread.followers))
        if known.unused < _MOST_UNUSED and known.learned[: len(found)] != found:
            known.learn(found, call.step)
    return []


def give(modules: list[Any], outputs: list[torch.Tensor], state_of: StateOf) -> None:
    """The modules' outputs, in their present states, for the input of the present call."""
    _thread.outputs = {
        id(module): _Output(y, state_of(module)) for module, y in zip(modules, outputs, strict=True)
    }
    _thread.followers = list(modules)
