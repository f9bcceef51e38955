"""A running call as an iterator that retries if it may."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

from dorad._aio.calls import RunningCalls
from dorad._aio.images import CallImages
from dorad._asyncio import AsDoradErrors, Event, is_set_within, read
from dorad._retry import Attempts
from dorad.errors import DoradError

T = TypeVar("T")


class Stream(Generic[T]):
    """Messages of a running call, as an async iterator.

    Leaving its `async with` block, `close()`, or dropping the object cancels the call on the server
    when it has not ended by itself. Iterate from one task; `close()` may come from any.
    """

    def __init__(
        self,
        start: Callable[[float | None], Any],
        convert: Callable[[Any], T],
        attempts: Attempts,
        calls: RunningCalls,
        images: CallImages | None = None,
    ) -> None:
        self._start = start
        self._convert = convert
        self._attempts = attempts
        self._calls = calls  # Once these have been ended, no call is retried.
        self._images = images
        self._closed = Event()
        self._call = start(attempts.budget.left)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        while not self._closed.is_set():
            self._calls.process.check()
            try:
                with AsDoradErrors():
                    message = await read(self._call)
            except DoradError as error:
                if self._closed.is_set():
                    break  # Another task has called close(): this one was not cancelled.
                lacks = self._images is not None and self._images.lacking(error)
                delay = 0.0 if lacks else self._attempts.delay(error)
                if delay is None:
                    raise
                if await is_set_within(self._closed, delay):
                    break
                if self._calls.ended:
                    raise
            else:
                if message is None:
                    break
                self._attempts.answered()
                if self._images is not None:
                    self._images.arrived()
                return self._convert(message)
            self._call = self._start(self._attempts.budget.left)
            if self._closed.is_set():  # close() may have cancelled the call before this one.
                self._call.cancel()
        raise StopAsyncIteration

    def close(self) -> None:
        """Cancels the call unless it has ended. Idempotent."""
        self._closed.set()
        if not self._calls.process.forked:
            self._call.cancel()
            if self._images is not None:
                self._images.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Without this, gRPC itself keeps an abandoned call alive. After the event loop has closed
        # there is no call left to cancel, and cancelling raises.
        if hasattr(self, "_call"):
            with contextlib.suppress(RuntimeError):
                self.close()
