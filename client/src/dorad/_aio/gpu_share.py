"""A limit that is renewed while a block runs, and ends with it."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from dorad._asyncio import Event, begin, end, is_set_within
from dorad.errors import DoradError

_logger = logging.getLogger("dorad")

DEFAULT_TIME_TO_LIVE = 30.0
_RENEWALS = 3  # within the time to live: two of them may fail


def new_id() -> str:
    return uuid.uuid4().hex


def renewal_interval(time_to_live: float) -> float:
    """Seconds between two renewals, and the time limit of one."""
    if not time_to_live > 0:
        raise ValueError(f"time_to_live must be positive, not {time_to_live}")
    return time_to_live / _RENEWALS


@asynccontextmanager
async def renewed(
    renew: Callable[[], Awaitable[float]], release: Callable[[], Awaitable[object]], interval: float
) -> AsyncIterator[float]:
    """Calls `renew` at once, then every `interval` seconds in the background, then `release`.

    Only the first failure is raised: the block's work does not depend on later ones, and a limit
    ends by itself.
    """
    share = await renew()
    over = Event()

    async def keep() -> None:
        while not await is_set_within(over, interval):
            try:
                await renew()
            except DoradError as error:
                _logger.warning("the GPU share limit could not be renewed: %s", error)

    renewals = begin(keep, "dorad-gpu-share")
    try:
        yield share
    finally:
        # Not cancelled: a running renewal might reach the server after the end.
        over.set()
        await end(renewals)
        try:
            await release()
        except DoradError as error:
            _logger.warning(
                "the GPU share limit could not be ended; it expires by itself: %s", error
            )
