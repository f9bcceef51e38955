"""The running calls, so that all of them can be ended at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dorad._asyncio import Event, is_set_within
from dorad._channel import Process, closed


class RunningCalls:
    """The calls of a client, or a part of them. Thread-safe, because a set's methods are."""

    def __init__(self) -> None:
        self._ended = Event()
        self._calls: set[Any] = set()
        self.process = Process()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def check(self) -> None:
        """Raises if no call can begin any more."""
        self.process.check()
        if self.ended:
            raise closed()

    async def ended_within(self, seconds: float) -> bool:
        """Waits for the end, at most `seconds`. Returns whether it has ended."""
        return await is_set_within(self._ended, seconds)

    @contextmanager
    def running(self, call: Any) -> Iterator[None]:
        """A block that waits for the call. When the block is left early, the call is cancelled."""
        self._calls.add(call)
        try:
            if self.ended:  # cancel() may not have seen it.
                call.cancel()
            yield
        finally:
            self._calls.discard(call)
            call.cancel()

    def cancel(self) -> None:
        """Cancels the running calls; later ones end at once. Idempotent."""
        self._ended.set()
        for call in self._calls.copy():
            call.cancel()
