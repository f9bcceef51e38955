"""Many prompts at once on an event loop, for the asyncio client and the pool."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from dorad import types as t
from dorad._channel import check_concurrency
from dorad.errors import DoradError


async def run_many(
    todo: Sequence[t.GenerateRequest],
    generate: Callable[[t.GenerateRequest], Awaitable[list[t.Sample]]],
    *,
    concurrency: int,
    return_errors: bool,
    progress: Callable[[int, int], None] | None,
) -> list[Any]:
    """Runs `generate` for each request, at most `concurrency` at once; results in order.

    The first DoradError cancels the rest, or, with `return_errors`, takes its result's place.
    """
    results: list[Any] = [None] * len(todo)
    indices = iter(range(len(todo)))
    done = 0

    async def work() -> None:
        nonlocal done
        for index in indices:
            try:
                results[index] = await generate(todo[index])
            except DoradError as error:
                if not return_errors:
                    raise
                results[index] = error
            done += 1
            if progress is not None:
                progress(done, len(todo))

    count = min(check_concurrency(concurrency), len(todo))
    workers = [asyncio.create_task(work()) for _ in range(count)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return results
