"""A cache of server answers that many requests need. Concurrent requests share one call."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Answers(Generic[K, V]):
    """An LRU cache with a time to live. Use it from one event loop.

    Args:
      seconds: time to live of an answer.
      most: maximum number of answers.
    """

    def __init__(self, *, seconds: float, most: int = 1) -> None:
        self._seconds = seconds
        self._most = most
        self._known: OrderedDict[K, tuple[float, V]] = OrderedDict()
        self._asking: dict[K, asyncio.Task[V]] = {}

    async def get(self, key: K, ask: Callable[[], Coroutine[Any, Any, V]]) -> V:
        """Returns the cached answer, or that of one call of `ask` shared by all waiters.

        A failure of `ask` is raised to all waiters and is not cached.
        """
        known = self._known.get(key)
        if known is not None and time.monotonic() - known[0] <= self._seconds:
            self._known.move_to_end(key)
            return known[1]
        task = self._asking.get(key)
        if task is None:
            task = self._asking[key] = asyncio.create_task(self._ask(key, ask))
            task.add_done_callback(_take_exception)
        # The task continues when the first waiter is cancelled.
        return await asyncio.shield(task)

    def forget(self, key: K) -> None:
        """The next `get` asks again."""
        self._known.pop(key, None)

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
    """Keeps asyncio from reporting the exception when all waiters are gone."""
    if not task.cancelled():
        task.exception()
