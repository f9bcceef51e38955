"""Writes answers as JSON. Long answers let other tasks run meanwhile."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

_SLICE = 16  # Rows per slice. A row may be a table.
_TURN_SECONDS = 0.002

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


class Rows:
    """A list in an answer. Each item becomes a row when it is written."""

    def __init__(self, items: Sequence[T], row: Callable[[T], Any]) -> None:
        self._items = items
        self._row = row

    def slices(self) -> Iterator[list[Any]]:
        for begin in range(0, len(self._items), _SLICE):
            yield [self._row(item) for item in self._items[begin : begin + _SLICE]]


def to_json(value: Any) -> bytes:
    return _encode(value).encode()


async def write(value: Any) -> bytes:
    """Like `to_json`, also for values with `Rows`. Other tasks run meanwhile."""
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
