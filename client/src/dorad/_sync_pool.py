"""The pool for threads: dorad.aio.RolloutPool on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Literal, Self, TypeVar, Unpack, overload

from dorad import aio
from dorad import types as t
from dorad.errors import Cancelled, DoradError

T = TypeVar("T")


class RolloutPool:
    """Several servers of one model as one. Thread-safe; make one and share it.

    A version is published to all servers under the same number, and becomes active on all of them
    or on none. Prompts go to the server with the fewest outstanding ones. Arguments and errors are
    those of `dorad.aio.RolloutPool`; `connect` is called on the pool's own event loop and makes a
    `dorad.aio.Client`.
    """

    def __init__(
        self,
        targets: Iterable[str],
        *,
        connect: Callable[[str], aio.Client] | None = None,
        timeout: float | None = 600.0,
        token: str | None = None,
        ca_file: str | os.PathLike[str] | None = None,
        cert_file: str | os.PathLike[str] | None = None,
        key_file: str | os.PathLike[str] | None = None,
    ) -> None:
        self._closed = False
        self._lock = threading.Lock()  # Of it: nothing is begun that close() would not end.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

        async def make() -> aio.RolloutPool:
            return aio.RolloutPool(
                targets,
                connect=connect,
                timeout=timeout,
                token=token,
                ca_file=ca_file,
                cert_file=cert_file,
                key_file=key_file,
            )

        try:
            self._pool = self._run(make())
        except BaseException:
            self.close()
            raise

    def _refuse_own_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "generate_many's progress and the pool's connect run in the pool's own thread,"
                " where waiting for the pool would never end: use it from another thread"
            )

    def _begin(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        self._refuse_own_thread()
        with self._lock:
            if self._closed:
                raise Cancelled("the pool is closed", code="CANCELLED")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            future = self._begin(work)
        except BaseException:
            work.close()  # Or it is missed: "was never awaited".
            raise
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise Cancelled("the pool was closed", code="CANCELLED") from None
        except BaseException:  # KeyboardInterrupt, for one: the work must not go on.
            future.cancel()
            raise

    def close(self) -> None:
        """Closes all connections; calls that run in other threads raise Cancelled. Idempotent."""
        self._refuse_own_thread()
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _end(self) -> None:
        """Cancels all work, whose callers wait for its end, and waits for it."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if hasattr(self, "_pool"):
            await self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def targets(self) -> list[str]:
        return self._pool.targets

    def add(self, target: str) -> None:
        """Takes a server in. It gets prompts when the pool's active versions are active there."""

        async def work() -> None:
            self._pool.add(target)

        self._run(work())

    def remove(self, target: str) -> None:
        """Goes on without a server. Prompts that are running there go to other ones."""
        self._run(self._pool.remove(target))

    def publish(
        self,
        name: str,
        *,
        activate: bool = True,
        timeout: float | None = None,
        **options: Unpack[t.PublishOptions],
    ) -> t.AdapterVersion:
        """Publishes to all servers at the same time, under one number; returns when all are ready.

        Raises PoolError when servers fail: then nothing is activated.
        """
        return self._run(self._pool.publish(name, activate=activate, timeout=timeout, **options))

    def activate(
        self, version: str | t.AdapterVersion, *, timeout: float | None = None
    ) -> t.AdapterVersion:
        """Makes a version ("name@version") active on all servers, if all have it ready.

        Raises PoolError when servers fail: then the others are set back.
        """
        return self._run(self._pool.activate(version, timeout=timeout))

    def retire(
        self, version: str | t.AdapterVersion, *, force: bool = False, timeout: float | None = None
    ) -> None:
        """Unpublishes a version on all servers, as `Client.retire`. Raises PoolError."""
        self._run(self._pool.retire(version, force=force, timeout=timeout))

    @overload
    def generate_many(
        self,
        requests: Iterable[t.TokenIds | t.GenerateRequest],
        *,
        concurrency: int = ...,
        return_errors: Literal[False] = ...,
        progress: Callable[[int, int], None] | None = ...,
        timeout: float | None = ...,
        **options: Unpack[t.GenerateOptions],
    ) -> list[list[t.Sample]]: ...

    @overload
    def generate_many(
        self,
        requests: Iterable[t.TokenIds | t.GenerateRequest],
        *,
        concurrency: int = ...,
        return_errors: Literal[True],
        progress: Callable[[int, int], None] | None = ...,
        timeout: float | None = ...,
        **options: Unpack[t.GenerateOptions],
    ) -> list[list[t.Sample] | DoradError]: ...

    def generate_many(
        self,
        requests: Iterable[t.TokenIds | t.GenerateRequest],
        *,
        concurrency: int = 512,
        return_errors: bool = False,
        progress: Callable[[int, int], None] | None = None,
        timeout: float | None = None,
        **options: Unpack[t.GenerateOptions],
    ) -> Any:
        """As `Client.generate_many`, over all servers; `progress` is called from another thread.
        That one is the pool's: `progress` must not call the pool.

        Raises UnexpectedVersion when another version than the active one made a token, and
        Unavailable when a prompt failed on every server.
        """
        many: Any = self._pool.generate_many  # The overloads want a literal.
        return self._run(
            many(
                requests,
                concurrency=concurrency,
                return_errors=return_errors,
                progress=progress,
                timeout=timeout,
                **options,
            )
        )

    def report(self) -> list[t.TargetReport]:
        """How every server does: asks each for its state, its queue and its active versions."""
        return self._run(self._pool.report())
