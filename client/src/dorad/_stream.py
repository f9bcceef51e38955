"""A running call as an iterator that begins again when it may; for threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

import grpc

from dorad._retry import Attempts
from dorad.errors import from_rpc_error

T = TypeVar("T")


class Stream(Generic[T]):
    """Messages of a running call, as an iterator.

    Leaving its `with` block, `close()`, or dropping the object cancels the call on the server when
    it has not ended by itself. Iterate from one thread; `close()` may come from any.
    """

    def __init__(
        self,
        start: Callable[[float], Any],
        convert: Callable[[Any], T],
        attempts: Attempts,
        ended: threading.Event,
    ) -> None:
        self._start = start
        self._convert = convert
        self._attempts = attempts
        self._ended = ended  # The client is closed: nothing is tried again.
        self._closed = threading.Event()
        self._call = start(attempts.left)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        while True:
            try:
                message = next(self._call)
            except grpc.RpcError as error:
                if self._closed.is_set():
                    raise StopIteration from None
                failure = from_rpc_error(error)
                delay = self._attempts.delay(failure)
                if delay is None:
                    raise failure from None
            else:
                self._attempts.answered()
                return self._convert(message)
            if self._closed.wait(delay):
                raise StopIteration
            if self._ended.is_set():
                raise failure from None
            self._call = self._start(self._attempts.left)
            if self._closed.is_set():  # It may have cancelled the call before this one.
                self._call.cancel()

    def close(self) -> None:
        """Cancels the call unless it has ended. Idempotent."""
        self._closed.set()
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            self.close()
