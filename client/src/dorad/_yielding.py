"""A yield that is renewed for as long as a block runs, and ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from dorad._stubs import control_pb2
from dorad.errors import DoradError

_logger = logging.getLogger("dorad")

DEFAULT_TIME_TO_LIVE = 30.0
_RENEWALS = 3  # within the time to live: two of them may fail


def new_id() -> str:
    return uuid.uuid4().hex


def renewal_interval(time_to_live: float) -> float:
    """Seconds between two renewals, and what one may take."""
    if not time_to_live > 0:
        raise ValueError(f"time_to_live must be positive, not {time_to_live}")
    return time_to_live / _RENEWALS


def yield_request(share: float, time_to_live: float, yield_id: str) -> control_pb2.YieldRequest:
    message = control_pb2.YieldRequest(yield_id=yield_id, gpu_share=share)
    message.time_to_live.FromNanoseconds(round(time_to_live * 1e9))
    return message


def _warn(what: str, error: DoradError) -> None:
    _logger.warning("%s: %s", what, error)


@contextlib.contextmanager
def renewed(
    renew: Callable[[], float], end: Callable[[], object], interval: float
) -> Iterator[float]:
    """Calls `renew` at once, then every `interval` seconds from a thread of its own, then `end`.

    Only the first failure is raised: the block's work does not depend on the others, and a yield
    ends by itself.
    """
    share = renew()
    over = threading.Event()

    def keep() -> None:
        while not over.wait(interval):
            try:
                renew()
            except DoradError as error:
                _warn("a yield could not be renewed", error)

    thread = threading.Thread(target=keep, name="dorad-yield", daemon=True)
    thread.start()
    try:
        yield share
    finally:
        over.set()
        thread.join()
        try:
            end()
        except DoradError as error:
            _warn("a yield could not be ended, but its time will", error)


@contextlib.asynccontextmanager
async def renewed_async(
    renew: Callable[[], Awaitable[float]], end: Callable[[], Awaitable[object]], interval: float
) -> AsyncIterator[float]:
    """As `renewed`, from a task."""
    share = await renew()
    over = asyncio.Event()

    async def keep() -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), interval)
                return
            try:
                await renew()
            except DoradError as error:
                _warn("a yield could not be renewed", error)

    task = asyncio.create_task(keep(), name="dorad-yield")
    try:
        yield share
    finally:
        # Not cancelled: a renewal under way might reach the server after the end.
        over.set()
        await asyncio.wait([task])
        try:
            await end()
        except DoradError as error:
            _warn("a yield could not be ended, but its time will", error)
