"""The asyncio part of the asyncio client. dorad._threads has the same names for threads.

Has only differences beyond `async` and `await`; the rest is in dorad._aio.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import grpc

from dorad import types as t
from dorad._access import Access
from dorad._channel import check_concurrency, closed
from dorad.errors import DoradError, from_rpc_error

if TYPE_CHECKING:
    from dorad._aio.calls import RunningCalls
    from dorad.answers import Answers

T = TypeVar("T")
R = TypeVar("R")

Event = asyncio.Event
sleep = asyncio.sleep


async def is_set_within(event: Event, seconds: float | None) -> bool:
    """Waits for the event, at most `seconds` (None: no limit). Returns whether it is set."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()


def begin(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> asyncio.Task[None]:
    """Runs `work` in the background. The caller keeps the result and waits for it with `end`."""
    return asyncio.create_task(work(), name=name)


async def end(background: asyncio.Task[None]) -> None:
    """Waits until background work has ended."""
    await asyncio.wait([background])


# --- gRPC -----------------------------------------------------------------------------------------


def connect(access: Access, target: str, options: list[tuple[str, Any]]) -> Any:
    try:
        asyncio.get_running_loop()  # The channel binds to it: fail here rather than hang later.
    except RuntimeError:
        raise RuntimeError(
            "no running event loop: make or unpickle clients of dorad.aio inside a coroutine"
        ) from None
    return access.aio_channel(target, options)


class AsDoradErrors:
    """A block that waits for a call. Its failures become DoradErrors."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, grpc.RpcError):
            raise from_rpc_error(error) from None
        if isinstance(error, asyncio.CancelledError):
            # Closing a channel cancels the tasks that wait for its calls; the caller did not.
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                raise closed() from None


async def read(call: Any) -> Any:
    """The next message of a streaming call; None: the call has ended."""
    message = await call.read()
    return None if message is grpc.aio.EOF else message


# --- Uploads --------------------------------------------------------------------------------------


def upload_channel(
    access: Access, target: str, options: list[tuple[str, Any]], shared: Any
) -> AbstractContextManager[Any]:
    """A synchronous connection of its own for one upload.

    grpc.aio can lose the server's status when a call ends while the client still writes (it
    reports INTERNAL instead, grpc issue 36066), which would hide the refusal of an adapter. Disk
    reads and hashing stay off the event loop this way as well.
    """
    channel: AbstractContextManager[Any] = access.channel(target, options)
    return channel


async def outcome(call: Any) -> Any:
    """Waits for the future of a synchronous call; returns its answer."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def wake(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # The loop has been closed meanwhile.
            loop.call_soon_threadsafe(done.set)

    call.add_done_callback(wake)
    await done.wait()
    return call.result()


@contextlib.asynccontextmanager
async def entered(manager: AbstractContextManager[T]) -> AsyncIterator[T]:
    """A block inside `manager`, which is entered off the event loop."""
    entering = asyncio.ensure_future(asyncio.to_thread(manager.__enter__))
    try:
        value = await asyncio.shield(entering)
    except asyncio.CancelledError:

        def leave(done: asyncio.Future[T]) -> None:
            if done.exception() is None:
                manager.__exit__(None, None, None)

        entering.add_done_callback(leave)
        raise
    with contextlib.ExitStack() as stack:
        stack.push(manager)
        yield value


# --- Many prompts at once -------------------------------------------------------------------------


async def run_many(
    todo: Sequence[t.GenerateRequest],
    generate: Callable[[t.GenerateRequest], Awaitable[list[t.Sample]]],
    *,
    concurrency: int,
    return_errors: bool,
    progress: Callable[[int, int], None] | None,
    answers: Answers | None,
    choose: Callable[[Iterable[t.GenerateRequest]], int] = lambda waiting: 0,
) -> list[Any]:
    """Runs `generate` for each request, at most `concurrency` at once; results in order.

    `choose` gets the requests that wait, at least one, and returns the place of the next one.

    A DoradError takes its result's place. Without `return_errors` the first one cancels the rest
    and is raised with the results so far; None stands for unfinished ones. `answers` offers drafts
    before the first one runs, and keeps what comes.
    """
    if answers is not None:
        todo = [answers.offer(request) for request in todo]
    results: list[Any] = [None] * len(todo)
    waiting = deque(range(len(todo)))
    done = 0

    async def work() -> None:
        nonlocal done
        while waiting:
            place = choose(todo[index] for index in waiting)
            index = waiting[place]
            del waiting[place]
            try:
                results[index] = await generate(todo[index])
            except DoradError as error:
                results[index] = error
                if not return_errors:
                    raise
            else:
                if answers is not None:
                    answers.keep(todo[index], results[index])
            done += 1
            if progress is not None:
                progress(done, len(todo))

    count = min(check_concurrency(concurrency), len(todo))
    workers = [asyncio.create_task(work()) for _ in range(count)]
    try:
        await asyncio.gather(*workers)
    except BaseException as error:
        cast(Any, error).results = results
        raise
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return results


async def run_calls(
    todo: Sequence[t.GenerateRequest],
    generate: Callable[[t.GenerateRequest, RunningCalls], Awaitable[list[t.Sample]]],
    calls: RunningCalls,
    **options: Any,
) -> list[Any]:
    """As `run_many`. Each `generate` gets the set of its calls: the client's."""
    return await run_many(todo, lambda request: generate(request, calls), **options)


# --- The pool -------------------------------------------------------------------------------------


class Runner(Generic[T]):
    """Runs the work of an asyncio object made by `make`, on the caller's event loop."""

    def __init__(self, make: Callable[[], T]) -> None:
        self.object = make()

    def call(self, function: Callable[[], None]) -> None:
        function()

    async def run(self, work: Coroutine[Any, Any, R]) -> R:
        return await work

    async def close(self, end: Callable[[T], Coroutine[Any, Any, None]]) -> None:
        await end(self.object)
