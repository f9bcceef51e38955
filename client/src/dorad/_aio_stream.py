"""A running call as an async iterator that begins again when it may."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

import grpc

from dorad._aio_errors import as_dorad_errors
from dorad._retry import Attempts
from dorad.errors import DoradError

T = TypeVar("T")


class Stream(Generic[T]):
    """Messages of a running call, as an async iterator.

    Leaving its `async with` block, `close()`, or dropping the object cancels the call on the server
    when it has not ended by itself.
    """

    def __init__(
        self,
        start: Callable[[float], Any],
        convert: Callable[[Any], T],
        attempts: Attempts,
        ended: asyncio.Event,
    ) -> None:
        self._start = start
        self._convert = convert
        self._attempts = attempts
        self._ended = ended  # The client is closed: nothing is tried again.
        self._closed = asyncio.Event()
        self._call = start(attempts.left)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        while not self._closed.is_set():
            try:
                with as_dorad_errors():
                    message = await self._call.read()
            except DoradError as error:
                if self._closed.is_set():
                    break  # close() from another task: this one goes on.
                failure = error
                delay = self._attempts.delay(failure)
                if delay is None:
                    raise
            else:
                if message is grpc.aio.EOF:
                    break
                self._attempts.answered()
                return self._convert(message)
            if await is_set_within(self._closed, delay):
                break
            if self._ended.is_set():
                raise failure from None
            self._call = self._start(self._attempts.left)
        raise StopAsyncIteration

    def close(self) -> None:
        """Cancels the call unless it has ended. Idempotent."""
        self._closed.set()
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Without this, gRPC's own task keeps an abandoned call alive. After the loop has closed
        # there is no call left to cancel, and cancelling raises.
        if hasattr(self, "_call"):
            with contextlib.suppress(RuntimeError):
                self.close()


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Waits for the event, at most so long; says whether it came."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()
