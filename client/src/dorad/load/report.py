"""The report of a run as plain numbers for JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dorad.load.plan import Goals, Plan
from dorad.load.records import Outcome, Record

_PERCENTILES = (50, 90, 95, 99)
# Above these limits the generator is the bottleneck.
_BUSY_SHARE = 0.9
_LATE_SECONDS = 0.1


def distribution(values: Sequence[float] | npt.NDArray[np.float64]) -> dict[str, float] | None:
    """Mean, percentiles and maximum in milliseconds, from seconds. None without values."""
    if len(values) == 0:
        return None
    array = np.asarray(values) * 1000
    found = {f"p{p}": float(np.percentile(array, p)) for p in _PERCENTILES}
    return {"mean": float(array.mean()), **found, "max": float(array.max())}


def summarise(plan: Plan, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Counts, rates per second, and latency distributions in milliseconds.

    Counts and latencies cover the requests after the warm-up. Rates cover the plan's duration,
    without the `drain_seconds` after it. For a plan without a duration they cover the whole run,
    and `drain_seconds` is None.

    `refused` is separate from `failed`, because a full server is right to refuse.
    """
    records = [r for o in outcomes for r in o.records if r.start >= o.began]
    seconds = max(o.ended for o in outcomes) - min(o.began for o in outcomes)
    good = [r for r in records if not r.error]
    rated = _rated(plan, outcomes, records, seconds)
    by_adapter: Counter[str] = Counter(r.adapter or "base" for r in records)
    failed = [r for r in records if r.error and not r.refused]
    return {
        "loop": "open" if plan.rate is not None else "closed",
        "offered_rate": plan.rate,
        "concurrency": plan.concurrency,
        "seconds": seconds,
        "drain_seconds": None if plan.duration is None else max(0.0, seconds - rated.seconds),
        "requests": len(records),
        "failed": len(failed),
        "errors": dict(Counter(r.error for r in failed)),
        "refused": _refused([r for r in records if r.refused]),
        "requests_by_adapter": dict(by_adapter),
        "requests_per_second": len(rated.answered) / rated.seconds,
        "generated_tokens": sum(r.tokens for r in records),
        "generated_tokens_per_second": rated.tokens / rated.seconds,
        "prompt_tokens": sum(r.prompt_tokens for r in good),
        "prompt_tokens_per_second": sum(r.prompt_tokens for r in rated.answered) / rated.seconds,
        "ttft_ms": distribution([r.ttft for r in good if r.ttft is not None]),
        "itl_ms": distribution(_gaps(good)),
        "longest_gap_ms": distribution([r.longest_gap for r in good if r.gaps]),
        "e2e_ms": distribution([r.end - r.start for r in good]),
        "goodput": _goodput(plan.goals, good, len(records), rated),
        "generator": _generator(plan, outcomes, records),
    }


@dataclass
class _Rated:
    """Counts and seconds of the rates."""

    answered: list[Record]
    tokens: int
    seconds: float


def _rated(
    plan: Plan, outcomes: Sequence[Outcome], records: list[Record], seconds: float
) -> _Rated:
    """`records` are the requests after the warm-up, `seconds` the duration of the run."""
    if plan.duration is None:
        good = [r for r in records if not r.error]
        return _Rated(good, sum(r.tokens for r in records), seconds)
    # Answers to requests of the warm-up count, and answers after the end do not. In a steady state
    # both are equally many.
    answered = [
        r
        for o in outcomes
        for r in o.records
        if not r.error and o.began <= r.end <= o.began + plan.duration
    ]
    tokens = sum(r.timely_tokens for o in outcomes for r in o.records)
    # A limited number of requests may end before the duration.
    span = plan.duration if plan.requests is None else min(plan.duration, seconds)
    return _Rated(answered, tokens, span)


def _gaps(records: list[Record]) -> npt.NDArray[np.float64]:
    pairs = [pair for record in records for pair in record.gaps]
    return np.repeat([gap for gap, _ in pairs], [count for _, count in pairs])


def _refused(records: list[Record]) -> dict[str, Any]:
    hints = [r.retry_after for r in records if r.retry_after is not None]
    return {
        "requests": len(records),
        "reasons": dict(Counter(r.error for r in records)),
        "latency_ms": distribution([r.end - r.sent for r in records]),
        "retry_after_ms": distribution(hints),
        "without_retry_after": len(records) - len(hints),
    }


def _goodput(
    goals: Goals, answered: list[Record], requests: int, rated: _Rated
) -> dict[str, Any] | None:
    """Requests that met all goals. Refused and failed requests do not count."""
    if not goals.any():
        return None

    def kept(record: Record) -> bool:
        ttft = math.inf if record.ttft is None else record.ttft
        tokens = sum(count for _, count in record.gaps)
        itl = sum(gap * count for gap, count in record.gaps) / tokens if tokens else 0.0
        pairs = ((goals.ttft, ttft), (goals.itl, itl), (goals.e2e, record.end - record.start))
        return all(goal is None or value <= goal for goal, value in pairs)

    count = sum(kept(record) for record in answered)
    return {
        "goals_ms": {
            name: None if goal is None else goal * 1000
            for name, goal in (("ttft", goals.ttft), ("itl", goals.itl), ("e2e", goals.e2e))
        },
        "requests": count,
        "share": count / requests if requests else 0.0,
        "requests_per_second": sum(kept(record) for record in rated.answered) / rated.seconds,
    }


def _generator(plan: Plan, outcomes: Sequence[Outcome], records: list[Record]) -> dict[str, Any]:
    """CPU time and lags of the generator, and why it may be the bottleneck."""
    cpu = sum(o.cpu_seconds for o in outcomes)
    shares = [o.cpu_seconds / max(1e-9, o.ended - o.began) for o in outcomes]
    messages = sum(r.messages for r in records)
    tokens = sum(r.tokens for r in records)
    lags = np.concatenate([np.asarray(o.lags) for o in outcomes])
    late = [r.sent - r.start for r in records] if plan.rate is not None else []
    reasons = []
    if max(shares) >= _BUSY_SHARE:
        reasons.append(f"a process was busy for {max(shares):.0%} of the time")
    for values, what in ((lags, "had event loop lag"), (late, "sent late")):
        if len(values) and (p99 := float(np.percentile(values, 99))) > _LATE_SECONDS:
            reasons.append(f"it {what}: p99 is {p99 * 1000:.0f} ms")
    return {
        "processes": len(outcomes),
        "cpu_seconds": cpu,
        "cpu_share": max(shares),
        "cpu_us_per_request": cpu / len(records) * 1e6 if records else None,
        "cpu_us_per_message": cpu / messages * 1e6 if messages else None,
        "tokens_per_message": tokens / messages if messages else None,
        # Messages per second that it could read on idle cores.
        "messages_per_second_limit": messages / cpu * len(outcomes) if messages else None,
        "loop_lag_ms": distribution(lags),
        "sent_late_ms": distribution(late),
        "bottleneck": bool(reasons),
        "why": reasons,
    }
