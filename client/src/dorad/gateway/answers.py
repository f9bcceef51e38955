"""Answers of the server that many requests need: asked for once, then known for some seconds."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Answers(Generic[K, V]):
    """What was answered to which question. For one event loop.

    Args:
      seconds: how long an answer is good for.
      most: answers kept, the latest used ones.
    """

    def __init__(self, *, seconds: float, most: int = 1) -> None:
        self._seconds = seconds
        self._most = most
        self._known: OrderedDict[K, tuple[float, V]] = OrderedDict()
        self._asking: dict[K, asyncio.Task[V]] = {}

    async def get(self, key: K, ask: Callable[[], Coroutine[Any, Any, V]]) -> V:
        """The answer that is known, or the one that `ask` gets now, one call for all who wait.

        Raises what `ask` raises to all of them; nobody remembers it, the next one asks again.
        """
        known = self._known.get(key)
        if known is not None and time.monotonic() - known[0] <= self._seconds:
            self._known.move_to_end(key)
            return known[1]
        task = self._asking.get(key)
        if task is None:
            task = self._asking[key] = asyncio.create_task(self._ask(key, ask))
            task.add_done_callback(_take_exception)
        # It outlives whoever came first.
        return await asyncio.shield(task)

    async def _ask(self, key: K, ask: Callable[[], Coroutine[Any, Any, V]]) -> V:
        try:
            answer = await ask()
        finally:
            del self._asking[key]
        self._known[key] = (time.monotonic(), answer)
        self._known.move_to_end(key)
        if len(self._known) > self._most:
            self._known.popitem(last=False)
        return answer


def _take_exception(task: asyncio.Task[Any]) -> None:
    """Nobody may be left to take it, which is no fault."""
    if not task.cancelled():
        task.exception()
