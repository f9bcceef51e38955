"""Writes answers as JSON. Long answers let other tasks run meanwhile."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

_SLICE = 16  # Rows per slice. A row may be a table.
_FEW = 2 * _SLICE  # Rows of a value that is encoded at once, as events of a stream are.
_TURN_SECONDS = 0.002


def _encoder(default: Callable[[Any], Any] | None = None) -> Callable[[Any], str]:
    return json.JSONEncoder(
        ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=default
    ).encode


_encode = _encoder()


class Rows:
    """A list in an answer. Each item becomes a row when it is written."""

    def __init__(self, items: Sequence[T], row: Callable[[T], Any]) -> None:
        self._items = items
        self._row = row

    def __len__(self) -> int:
        return len(self._items)

    def whole(self) -> list[Any]:
        return [self._row(item) for item in self._items]

    def slices(self) -> Iterator[list[Any]]:
        for begin in range(0, len(self._items), _SLICE):
            yield [self._row(item) for item in self._items[begin : begin + _SLICE]]


class _Few:
    """Makes lists of `Rows` that have few rows together. Raises TypeError for more."""

    def __init__(self) -> None:
        self._left = _FEW

    def __call__(self, value: Any) -> list[Any]:
        if not isinstance(value, Rows):
            raise TypeError(f"{type(value).__name__} is not JSON")
        self._left -= len(value)
        if self._left < 0:
            raise TypeError("many rows")
        return value.whole()


def to_json(value: Any) -> bytes:
    return _encode(value).encode()


async def write(value: Any) -> bytes:
    """Like `to_json`, also for values with `Rows`. Other tasks run meanwhile."""
    try:
        return _encoder(_Few())(value).encode()
    except TypeError:  # It has many rows.
        pass
    parts = []
    turn = time.monotonic() + _TURN_SECONDS
    for part in _parts(value):
        parts.append(part.encode())
        if time.monotonic() > turn:
            await asyncio.sleep(0)
            turn = time.monotonic() + _TURN_SECONDS
    return b"".join(parts)


def _parts(value: Any) -> Iterator[str]:
    """The JSON in parts that are quick to encode."""
    if isinstance(value, Rows):
        yield "["
        for i, rows in enumerate(value.slices()):
            yield ("," if i else "") + _encode(rows)[1:-1]
        yield "]"
        return
    try:
        yield _encode(value)
    except TypeError:  # It contains Rows.
        if isinstance(value, dict):
            for i, (name, item) in enumerate(value.items()):
                yield ("," if i else "{") + _encode(name) + ":"
                yield from _parts(item)
            yield "}"
        elif isinstance(value, list):
            for i, item in enumerate(value):
                yield "," if i else "["
                yield from _parts(item)
            yield "]"
        else:
            raise
