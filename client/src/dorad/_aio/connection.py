"""A client's connection: start, failure and retry of calls."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2_grpc

from dorad import _wire
from dorad._access import Access, check_port, check_target
from dorad._aio.calls import RunningCalls
from dorad._aio.images import SentImages
from dorad._asyncio import AsDoradErrors, connect
from dorad._channel import DEFAULT_TARGET, Budget, channel_options, deadline
from dorad._retry import Attempts, Throttle, check_retry_for, default_retry_for
from dorad._shared_pixels import SharedPixels
from dorad._stubs import adapters_pb2_grpc, control_pb2_grpc, inference_pb2_grpc
from dorad.errors import DoradError

T = TypeVar("T")


class Connection:
    """The common part of the methods of a client's services."""

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        admin_target: str | None = None,
        timeout: float | None = 600.0,
        retry_for: float | None = None,
        keepalive: float = 60.0,
        token: str | None = None,
        ca_file: str | os.PathLike[str] | None = None,
        cert_file: str | os.PathLike[str] | None = None,
        key_file: str | os.PathLike[str] | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        shared_memory: str | os.PathLike[str] | None = None,
        metadata: Sequence[tuple[str, str]] = (),
        options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        self._arguments = {name: value for name, value in locals().items() if name != "self"}
        self.target = target
        self._timeout = timeout
        self._retry_for = default_retry_for(retry_for)
        self._throttle = Throttle()
        self._calls = RunningCalls()
        self._images = SentImages(None if shared_memory is None else SharedPixels(shared_memory))
        self._access = Access.of(token, ca_file, cert_file, key_file, credentials)
        self._metadata = (*metadata, *self._access.metadata)
        self._options = channel_options(keepalive, options)
        self._admin_target = admin_target or target
        # Both addresses are checked before a channel is made.
        for address in (target, self._admin_target):
            check_target(address)
            self._access.channel_credentials(address)
            check_port(address)
        self._channel = connect(self._access, target, self._options)
        self._admin = self._channel
        if admin_target is not None:
            self._admin = connect(self._access, admin_target, self._options)
        self._inference: Any = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._adapters: Any = adapters_pb2_grpc.AdapterServiceStub(self._admin)
        self._control: Any = control_pb2_grpc.ControlServiceStub(self._admin)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    def with_metadata(self, metadata: Sequence[tuple[str, str]]) -> Self:
        """A client over the same connection, whose calls carry `metadata` in place of this one's.

        For a proxy that forwards its callers' metadata. Close the original only.
        """
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._metadata = tuple(metadata)
        other._arguments = self._arguments | {"metadata": other._metadata, "token": ""}
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        # The arguments, not their meaning here: the other side has its own files and environment.
        if self._arguments["credentials"] is not None:
            raise TypeError("a client with credentials= cannot be pickled: give it the files")
        return functools.partial(type(self), **self._arguments), ()

    async def close(self) -> None:
        """Closes the connection; running calls raise Cancelled. Idempotent."""
        if self._calls.process.forked:  # The connection is the parent's.
            return
        self._calls.cancel()
        await self._channel.close()
        await self._admin.close()
        if self._images.shared is not None:
            self._images.shared.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def _sends_request_id(self) -> bool:
        """Whether the caller's metadata name the requests."""
        return any(key.lower() == "x-request-id" for key, _ in self._metadata)

    def _budget(self, timeout: float | None) -> Budget:
        """The seconds of a method's `timeout`."""
        seconds = deadline(timeout, self._timeout)
        return Budget(math.inf if seconds is None else seconds)

    def _patience(self, retry_for: float | None) -> float | None:
        """The seconds of a method's `retry_for`."""
        return self._retry_for if retry_for is None else check_retry_for(retry_for)

    def _attempts(
        self, timeout: float | None, retry_for: float | None, *, effects: bool = False
    ) -> Attempts:
        budget, patience = self._budget(timeout), self._patience(retry_for)
        return Attempts(budget, patience, self._throttle, effects=effects)

    def _start(self, method: Any, request: Any, timeout: float | None, *, about: Any = None) -> Any:
        """Starts a call with this client's deadline and metadata.

        `about` is a message that names the call's adapter, if `request` does not.
        """
        self._calls.check()
        return method(
            request,
            timeout=deadline(timeout, self._timeout),
            metadata=self._metadata + _wire.routing(request if about is None else about),
        )

    async def _call(
        self, method: Any, request: Any, timeout: float | None = None, *, about: Any = None
    ) -> Any:
        """Runs a unary call."""
        with AsDoradErrors():
            return await self._start(method, request, timeout, about=about)

    async def _ask(
        self,
        method: Any,
        request: Any,
        timeout: float | None,
        retry_for: float | None,
        *,
        effects: bool = False,
    ) -> Any:
        """As _call, with retries. `effects`: a second call would have a second effect."""
        attempts = self._attempts(timeout, retry_for, effects=effects)
        return await self._repeat(
            attempts, lambda: self._call(method, request, attempts.budget.left), self._calls
        )

    async def _repeat(
        self, attempts: Attempts, run: Callable[[], Awaitable[T]], calls: RunningCalls
    ) -> T:
        """Runs until an attempt succeeds or none is left, or `calls` have been ended."""
        while True:
            try:
                result = await run()
            except DoradError as error:
                delay = attempts.delay(error)
                if delay is None or await calls.ended_within(delay):
                    raise
            else:
                attempts.answered()
                return result
