"""Sends one process's part of a plan and records the answers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import dorad
from dorad.load.plan import Plan, Source
from dorad.load.records import Outcome, Record, SelfWatch
from dorad.load.report import summarise
from dorad.load.target import Connection, Target
from dorad.types import GenerateRequest

_SHOW_SECONDS = 0.25


@dataclass
class Counts:
    """Progress of a run, for a live view. Counts include the warm-up."""

    sent: int = 0
    done: int = 0
    refused: int = 0
    failed: int = 0
    tokens: int = 0
    first_tokens: int = 0
    first_token_seconds: float = 0.0
    cpu_seconds: float = 0.0
    """CPU time of the generator."""

    @property
    def in_flight(self) -> int:
        return self.sent - self.done - self.refused - self.failed

    def __add__(self, other: Counts) -> Counts:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Counts(*(a + b for a, b in pairs))


Show = Callable[[Counts], None]


async def run(
    target: Target, plan: Plan, *, connections: int = 1, show: Show | None = None
) -> dict[str, Any]:
    """Runs the plan in this process and returns the report (see `summarise`).

    Raises DoradError when the server does not tell of its model. Failures of single requests are
    counted in the report.
    """
    return summarise(plan, [await drive(target, plan, connections=connections, show=show)])


async def drive(
    target: Target,
    plan: Plan,
    *,
    connections: int = 1,
    show: Show | None = None,
    ready: Callable[[], None] = lambda: None,
) -> Outcome:
    """Like `run`, but returns the raw records. `ready` blocks until all processes may begin."""
    async with contextlib.AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(target.connect()) for _ in range(connections)]
        # Each connection asks, so that all are open before the load begins.
        vocabularies = [await connection.vocabulary() for connection in opened]
        source = Source(plan, vocabularies[0])
        ready()
        return await _Run(plan, source, opened, show).run()


class _Run:
    def __init__(
        self, plan: Plan, source: Source, connections: list[Connection], show: Show | None
    ) -> None:
        self._plan = plan
        self._source = source
        self._connections = connections
        self._show = show
        self._watch = SelfWatch()
        self._counts = Counts()
        self._records: list[Record] = []
        self._measured = 0
        self._begin = time.monotonic() + plan.warmup
        self._end = math.inf if plan.duration is None else self._begin + plan.duration

    async def run(self) -> Outcome:
        helpers = [asyncio.create_task(self._watch.run())]
        if self._plan.warmup > 0:
            helpers.append(asyncio.create_task(self._end_warmup()))
        if self._show is not None:
            helpers.append(asyncio.create_task(self._show_now_and_then(self._show)))
        try:
            await (self._open_loop() if self._plan.rate is not None else self._closed_loop())
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
        return Outcome(
            records=self._records,
            began=self._begin,
            ended=time.monotonic(),
            cpu_seconds=self._watch.cpu_seconds(),
            lags=self._watch.lags,
        )

    async def _end_warmup(self) -> None:
        await asyncio.sleep(self._begin - time.monotonic())
        self._watch.reset()

    async def _show_now_and_then(self, show: Show) -> None:
        while True:
            await asyncio.sleep(_SHOW_SECONDS)
            show(dataclasses.replace(self._counts, cpu_seconds=self._watch.cpu_seconds()))

    def _over(self, now: float) -> bool:
        wanted = self._plan.requests
        return now >= self._end or (wanted is not None and self._measured >= wanted)

    async def _open_loop(self) -> None:
        due = self._begin - self._plan.warmup
        try:
            async with asyncio.TaskGroup() as group:
                while not self._over(due := due + self._source.gap()):
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
                    group.create_task(self._one(due))
                    self._measured += due >= self._begin
        except ExceptionGroup as errors:  # Not from requests: their failures are results.
            raise errors.exceptions[0] from None

    async def _closed_loop(self) -> None:
        async def work() -> None:
            while not self._over(now := time.monotonic()):
                self._measured += now >= self._begin
                if not await self._one(now):
                    # Do not spin when the server refuses at once.
                    await asyncio.sleep(0.01)

        assert self._plan.concurrency is not None
        await asyncio.gather(*(work() for _ in range(self._plan.concurrency)))

    async def _one(self, due: float) -> bool:
        """Sends the next request and reads its answer. False: it failed or was refused."""
        request = self._source.next()
        connection = self._connections[self._counts.sent % len(self._connections)]
        self._counts.sent += 1
        record = Record(request.adapter, len(request.token_ids), due, time.monotonic())
        self._records.append(record)
        counts = self._counts
        try:
            await self._read(connection, request, record)
        except dorad.DoradError as error:
            record.error = error.reason or error.code
            # A request with a first message was accepted. UNAVAILABLE with a reason comes from the
            # server; without a reason the server is down.
            record.refused = record.messages == 0 and (
                isinstance(error, dorad.Overloaded)
                or (isinstance(error, dorad.Unavailable) and bool(error.reason))
            )
            record.retry_after = error.retry_after
        record.end = time.monotonic()
        counts.refused += record.refused
        counts.failed += bool(record.error) and not record.refused
        counts.done += not record.error
        return not record.error

    async def _read(self, connection: Connection, request: GenerateRequest, record: Record) -> None:
        last: dict[int, float] = {}
        counts = self._counts
        async with contextlib.aclosing(connection.stream(request)) as pieces:
            async for sample, count, failure in pieces:
                now = time.monotonic()
                record.messages += 1
                record.error = failure or record.error
                if not count:
                    continue
                record.tokens += count
                counts.tokens += count
                if self._begin <= now <= self._end:
                    record.timely_tokens += count
                if record.ttft is None:
                    record.ttft = now - record.start
                    counts.first_tokens += 1
                    counts.first_token_seconds += record.ttft
                before = last.get(sample)
                if before is not None:
                    record.gaps.append(((now - before) / count, count))
                    record.longest_gap = max(record.longest_gap, now - before)
                last[sample] = now
