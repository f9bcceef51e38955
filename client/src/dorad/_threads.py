"""The threading part of the synchronous client. dorad._asyncio has the same names for asyncio.

Has only differences beyond `async` and `await`; the rest is generated from dorad._aio.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import grpc

from dorad import types as t
from dorad._access import Access
from dorad._channel import Process, check_concurrency
from dorad.errors import Cancelled, DoradError, from_rpc_error

if TYPE_CHECKING:
    from dorad._sync.calls import RunningCalls
    from dorad.answers import Answers

T = TypeVar("T")
R = TypeVar("R")

Event = threading.Event
sleep = time.sleep


def is_set_within(event: Event, seconds: float | None) -> bool:
    """Waits for the event, at most `seconds` (None: no limit). Returns whether it is set."""
    return event.wait(seconds)


def begin(work: Callable[[], None], name: str) -> threading.Thread:
    """Runs `work` in the background. The caller keeps the result and waits for it with `end`."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def end(background: threading.Thread) -> None:
    """Waits until background work has ended."""
    background.join()


# --- gRPC -----------------------------------------------------------------------------------------


def connect(access: Access, target: str, options: list[tuple[str, Any]]) -> Any:
    return access.channel(target, options)


class AsDoradErrors:
    """A block that waits for a call. Its failures become DoradErrors."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, grpc.RpcError):
            raise from_rpc_error(error) from None


def read(call: Any) -> Any:
    """The next message of a streaming call; None: the call has ended."""
    return next(call, None)


# --- Uploads --------------------------------------------------------------------------------------


def upload_channel(
    access: Access, target: str, options: list[tuple[str, Any]], shared: Any
) -> AbstractContextManager[Any]:
    """The connection for one upload: the client's."""
    return contextlib.nullcontext(shared)


def outcome(call: Any) -> Any:
    """Waits for the future of a call; returns its answer."""
    return call.result()


def entered(manager: AbstractContextManager[T]) -> AbstractContextManager[T]:
    """A block inside `manager`."""
    return manager


# --- Many prompts at once -------------------------------------------------------------------------


def run_calls(
    todo: Sequence[t.GenerateRequest],
    generate: Callable[[t.GenerateRequest, RunningCalls], list[t.Sample]],
    calls: RunningCalls,
    *,
    concurrency: int,
    return_errors: bool,
    progress: Callable[[int, int], None] | None,
    answers: Answers | None,
) -> list[Any]:
    """Runs `generate` for each request, in at most `concurrency` threads; results in order.

    A DoradError takes its result's place. Without `return_errors` the first one cancels the rest
    and is raised with the results so far; None stands for unfinished ones. `answers` offers drafts
    before the first one runs, and keeps what comes. Each `generate` gets the set of its calls: a
    part of the client's.
    """
    if answers is not None:
        todo = [answers.offer(request) for request in todo]
    part = type(calls)()
    results: list[Any] = [None] * len(todo)
    lock = threading.Lock()
    done = 0

    def run(index: int) -> None:
        nonlocal done
        try:
            results[index] = generate(todo[index], part)
        except DoradError as error:
            if return_errors or not part.ended:  # Else another one's error has cancelled it.
                results[index] = error
            if not return_errors:
                raise
        else:
            if answers is not None:
                answers.keep(todo[index], results[index])
        with lock:
            done += 1
            if progress is not None:
                progress(done, len(todo))

    threads = min(check_concurrency(concurrency), max(1, len(todo)))
    with calls.running(part), ThreadPoolExecutor(threads) as workers:
        futures = [workers.submit(run, index) for index in range(len(todo))]
        try:
            finished, _ = concurrent.futures.wait(futures, return_when=FIRST_EXCEPTION)
            for future in finished:
                future.result()
        except BaseException as error:
            part.cancel()
            workers.shutdown(wait=True, cancel_futures=True)
            cast(Any, error).results = results
            raise
    return results


# --- The pool -------------------------------------------------------------------------------------


class Runner(Generic[T]):
    """Runs the work of an asyncio object made by `make`, on an event loop in its own thread.
    Thread-safe."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._closed = False
        self._process = Process()
        self._lock = threading.Lock()  # For close(): it must see all work that begins.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

        async def made() -> T:
            return make()

        try:
            self.object: T = self.run(made())
        except BaseException:
            self._stop()
            raise

    def _check_caller(self) -> None:
        self._process.check()
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "generate_many's progress and the pool's connect run in the pool's own thread,"
                " where waiting for the pool would never end: use it from another thread"
            )

    def _begin(self, work: Coroutine[Any, Any, R]) -> concurrent.futures.Future[R]:
        self._check_caller()
        with self._lock:
            if self._closed:
                raise Cancelled("the pool is closed", code="CANCELLED")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, function: Callable[[], None]) -> None:
        async def work() -> None:
            function()

        self.run(work())

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        try:
            future = self._begin(work)
        except BaseException:
            work.close()  # Avoids the warning "was never awaited".
            raise
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise Cancelled("the pool was closed", code="CANCELLED") from None
        except BaseException:  # For example KeyboardInterrupt: the work must stop.
            future.cancel()
            raise

    def close(self, end: Callable[[T], Coroutine[Any, Any, None]]) -> None:
        """Cancels all work, waits for its end, and then runs `end`. Idempotent."""
        if self._process.forked:  # The thread and the connections are the parent's.
            return
        self._check_caller()
        with self._lock:
            if self._closed:
                return
            self._closed = True

        async def last() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await end(self.object)

        try:
            asyncio.run_coroutine_threadsafe(last(), self._loop).result()
        finally:
            self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
