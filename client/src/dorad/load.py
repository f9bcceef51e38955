"""`dorad-load`: drives a server with many requests and reports latencies and throughput.

Closed loop keeps a fixed number of requests in flight; open loop sends them at the arrival times of
a Poisson process whether or not earlier ones have been answered. Open-loop latencies count from the
planned arrival, so a server that falls behind cannot hide it.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import dorad
import dorad.aio
from dorad.types import GenerateOptions

_PERCENTILES = (50, 90, 95, 99)


# --- What is sent ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts.

    Written "128" (fixed), "32:256" (uniform, both ends included) or "lognormal:200:0.5" (mean and
    sigma of the logarithm), optionally with a cap: "lognormal:200:0.5:1024".
    """

    kind: str
    a: float
    b: float = 0.0
    cap: int = 1 << 20

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Raises ValueError that shows the forms."""
        if re.fullmatch(r"\d+", text) and int(text) > 0:
            return cls("fixed", int(text))
        if match := re.fullmatch(r"(\d+):(\d+)", text):
            low, high = int(match[1]), int(match[2])
            if 0 < low <= high:
                return cls("uniform", low, high)
        if match := re.fullmatch(r"lognormal:([\d.]+):([\d.]+)(?::(\d+))?", text):
            mean, sigma, cap = float(match[1]), float(match[2]), int(match[3] or 1 << 20)
            if mean >= 1 and cap >= 1:
                return cls("lognormal", mean, sigma, cap)
        raise ValueError(f"{text!r} is no length: 128, 32:256 or lognormal:MEAN:SIGMA[:CAP]")

    def draw(self, rng: random.Random) -> int:
        if self.kind == "fixed":
            return int(self.a)
        if self.kind == "uniform":
            return rng.randint(int(self.a), int(self.b))
        # The mean of a lognormal is exp(mu + sigma²/2).
        mu = math.log(self.a) - self.b**2 / 2
        return max(1, min(self.cap, round(rng.lognormvariate(mu, self.b))))


@dataclass(frozen=True)
class Popularity:
    """Which adapter a request names."""

    adapters: list[str | None]
    weights: list[float]

    @classmethod
    def parse(cls, items: list[str], zipf: float | None) -> Popularity:
        """Items are "name", "name@version" or "base", each with an optional "=WEIGHT".

        With `zipf` the i-th item (from 1) weighs i^-zipf and no item may have its own weight.
        """
        if not items:
            return cls([None], [1.0])
        names: list[str | None] = []
        weights: list[float] = []
        for i, item in enumerate(items, 1):
            name, equals, weight = item.partition("=")
            if zipf is not None and equals:
                raise ValueError(f"{item!r} has a weight; with --zipf the order decides")
            names.append(None if name == "base" else name)
            weights.append(i**-zipf if zipf is not None else float(weight or 1))
        if min(weights) < 0 or sum(weights) <= 0:
            raise ValueError("adapter weights must not be negative, nor all zero")
        return cls(names, weights)

    def draw(self, rng: random.Random) -> str | None:
        return rng.choices(self.adapters, self.weights)[0]


@dataclass(frozen=True)
class Plan:
    """What a run does. Exactly one of `rate` and `concurrency` is set."""

    prompt: Lengths
    output: Lengths
    popularity: Popularity
    rate: float | None = None
    """Requests a second (open loop)."""
    concurrency: int | None = None
    """Requests in flight (closed loop)."""
    requests: int | None = None
    duration: float | None = None
    """Seconds in which requests are sent; those in flight are waited for."""
    n: int = 1
    shared_prefix: int = 0
    """Leading tokens that all prompts have in common."""
    temperature: float = 1.0
    seed: int = 0


# --- What is measured -----------------------------------------------------------------------------


@dataclass
class Record:
    """One request as the client saw it; times in seconds."""

    adapter: str | None
    prompt_tokens: int
    start: float
    """When it was due (open loop) or sent (closed loop)."""
    ttft: float | None = None
    gaps: list[float] = field(default_factory=list)
    """One for each token after a sample's first; a message of k tokens counts as k equal gaps."""
    longest_gap: float = 0.0
    tokens: int = 0
    end: float = 0.0
    error: str = ""


async def _one(
    client: dorad.aio.Client, record: Record, prompt: list[int], options: GenerateOptions
) -> None:
    last: dict[int, float] = {}
    try:
        async with client.stream(prompt, **options) as stream:
            async for delta in stream:
                now, count = time.monotonic(), len(delta.token_ids)
                if not count:
                    continue
                record.tokens += count
                if record.ttft is None:
                    record.ttft = now - record.start
                before = last.get(delta.index)
                if before is not None:
                    record.gaps += [(now - before) / count] * count
                    record.longest_gap = max(record.longest_gap, now - before)
                last[delta.index] = now
    except dorad.DoradError as error:
        record.error = error.reason or error.code
    record.end = time.monotonic()


class _Source:
    """Draws requests; the same plan gives the same ones."""

    def __init__(self, plan: Plan, vocab_size: int, reserved: set[int]) -> None:
        self._plan = plan
        self._rng = random.Random(plan.seed)
        self._ids = [i for i in range(vocab_size) if i not in reserved] or [0]
        self._prefix = self._rng.choices(self._ids, k=plan.shared_prefix)
        self._numbers = itertools.count()

    def gap(self) -> float:
        """Seconds to the next arrival."""
        assert self._plan.rate is not None
        return self._rng.expovariate(self._plan.rate)

    def next(self) -> tuple[str | None, list[int], GenerateOptions]:
        plan, rng = self._plan, self._rng
        adapter = plan.popularity.draw(rng)
        rest = max(0, plan.prompt.draw(rng) - plan.shared_prefix)
        prompt = (self._prefix + rng.choices(self._ids, k=rest)) or [self._ids[0]]
        options: GenerateOptions = {
            "adapter": adapter,
            "n": plan.n,
            "max_tokens": plan.output.draw(rng),
            "ignore_eos": True,  # The drawn length is the length.
            "temperature": plan.temperature,
            "seed": plan.seed + next(self._numbers),
        }
        return adapter, prompt, options


async def run(
    target: str,
    plan: Plan,
    *,
    timeout: float = 600.0,
    connections: int = 1,
    progress: Callable[[list[Record]], None] | None = None,
) -> dict[str, Any]:
    """Runs the plan and returns the report (see `summarise`).

    Raises DoradError when the server cannot be asked what model it holds; failures of single
    requests are counted in the report.
    """
    # Pools of their own: otherwise clients of one target share a connection.
    options = [("grpc.use_local_subchannel_pool", 1)]
    clients = [
        dorad.aio.Client(target, timeout=timeout, options=options) for _ in range(connections)
    ]
    try:
        model = (await clients[0].info()).model
        source = _Source(plan, model.vocab_size, set(model.eos_token_ids))
        records: list[Record] = []
        started = time.monotonic()
        if plan.rate is not None:
            await _open_loop(clients, plan, source, records, progress)
        else:
            await _closed_loop(clients, plan, source, records, progress)
        return summarise(plan, records, time.monotonic() - started)
    finally:
        for client in clients:
            await client.close()


async def _open_loop(
    clients: list[dorad.aio.Client],
    plan: Plan,
    source: _Source,
    records: list[Record],
    progress: Callable[[list[Record]], None] | None,
) -> None:
    due = time.monotonic()
    end = math.inf if plan.duration is None else due + plan.duration
    tasks: set[asyncio.Task[None]] = set()
    try:
        for number in itertools.count() if plan.requests is None else range(plan.requests):
            due += source.gap()
            if due >= end:
                break
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            adapter, prompt, options = source.next()
            record = Record(adapter, len(prompt), due)
            records.append(record)
            client = clients[number % len(clients)]
            task = asyncio.create_task(_one(client, record, prompt, options))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if progress is not None:
                progress(records)
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _closed_loop(
    clients: list[dorad.aio.Client],
    plan: Plan,
    source: _Source,
    records: list[Record],
    progress: Callable[[list[Record]], None] | None,
) -> None:
    assert plan.concurrency is not None
    end = math.inf if plan.duration is None else time.monotonic() + plan.duration

    async def work(client: dorad.aio.Client) -> None:
        while time.monotonic() < end and (plan.requests is None or len(records) < plan.requests):
            adapter, prompt, options = source.next()
            record = Record(adapter, len(prompt), time.monotonic())
            records.append(record)
            await _one(client, record, prompt, options)
            if progress is not None:
                progress(records)
            if record.error:
                await asyncio.sleep(0.01)  # A server that refuses at once must not make us spin.

    await asyncio.gather(*(work(clients[i % len(clients)]) for i in range(plan.concurrency)))


# --- The report -----------------------------------------------------------------------------------


def _distribution(values: list[float]) -> dict[str, float] | None:
    """Milliseconds; None without values."""
    if not values:
        return None
    array = np.asarray(values) * 1000
    found = {f"p{p}": float(np.percentile(array, p)) for p in _PERCENTILES}
    return {"mean": float(array.mean()), **found, "max": float(array.max())}


def summarise(plan: Plan, records: list[Record], seconds: float) -> dict[str, Any]:
    """The report: counts, rates over the whole run, and latency distributions in milliseconds."""
    good = [r for r in records if not r.error]
    tokens = sum(r.tokens for r in records)
    prompt_tokens = sum(r.prompt_tokens for r in good)
    by_adapter: Counter[str] = Counter(r.adapter or "base" for r in records)
    return {
        "loop": "open" if plan.rate is not None else "closed",
        "offered_rate": plan.rate,
        "concurrency": plan.concurrency,
        "seconds": seconds,
        "requests": len(records),
        "failed": len(records) - len(good),
        "errors": dict(Counter(r.error for r in records if r.error)),
        "requests_by_adapter": dict(by_adapter),
        "requests_per_second": len(good) / seconds,
        "generated_tokens": tokens,
        "generated_tokens_per_second": tokens / seconds,
        "prompt_tokens": prompt_tokens,
        "prompt_tokens_per_second": prompt_tokens / seconds,
        "ttft_ms": _distribution([r.ttft for r in good if r.ttft is not None]),
        "itl_ms": _distribution([gap for r in good for gap in r.gaps]),
        "longest_gap_ms": _distribution([r.longest_gap for r in good if r.gaps]),
        "e2e_ms": _distribution([r.end - r.start for r in good]),
    }
