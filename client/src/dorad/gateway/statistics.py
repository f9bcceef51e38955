"""Counts of the Open Inference Protocol's statistics extension, by model and version."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import dorad
from dorad import types as t
from dorad.gateway.errors import Refusal

_MODELS = 4096  # Callers name them, so the number must be bounded.


@dataclass(slots=True)
class Duration:
    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds

    def shown(self) -> dict[str, int]:
        return {"count": self.count, "ns": round(self.seconds * 1e9)}


@dataclass(slots=True)
class Counts:
    """Of one version of a model."""

    last: int = 0
    """When the last request ended, in ms since the Unix epoch. 0: never."""
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute: Duration = field(default_factory=Duration)

    def shown(self) -> dict[str, Any]:
        """In Triton's shape. Each request is one execution; the server batches tokens."""
        nothing = Duration().shown()
        return {
            "last_inference": self.last,
            "inference_count": self.success.count,
            "execution_count": self.success.count,
            "inference_stats": {
                "success": self.success.shown(),
                "fail": self.fail.shown(),
                "queue": self.queue.shown(),
                "compute_input": nothing,
                "compute_infer": self.compute.shown(),
                "compute_output": nothing,
                # Of whole answers, which nobody caches.
                "cache_hit": nothing,
                "cache_miss": nothing,
            },
            "batch_stats": [],
        }


@dataclass(slots=True)
class Run:
    """What is known of one request when it ends."""

    name: str
    version: str
    """The version that made the last token, or the one that the caller wants ("": any)."""
    usage: t.Usage | None = None
    """The server's. None: the call ended before its finish."""


class Statistics:
    """The counts since the gateway's start. Use it from one event loop."""

    def __init__(self) -> None:
        self._counts: OrderedDict[tuple[str, str], Counts] = OrderedDict()

    def of(self, name: str) -> dict[str, Counts]:
        """Counts by version."""
        return {v: counts for (n, v), counts in self._counts.items() if n == name}

    @contextmanager
    def request(self, name: str, version: str) -> Iterator[Run]:
        """A block that serves one request. One that names no model or is wrong does not count."""
        run, began = Run(name, version), time.monotonic()
        try:
            yield run
        except (dorad.NotFound, dorad.InvalidArgument, Refusal):
            raise
        except BaseException:
            self._at(run).fail.add(time.monotonic() - began)
            raise
        counts = self._at(run)
        counts.success.add(time.monotonic() - began)
        if run.usage is not None:
            counts.queue.add(run.usage.queue_time)
            counts.compute.add(max(0.0, run.usage.total_time - run.usage.queue_time))

    def _at(self, run: Run) -> Counts:
        key = (run.name, run.version)
        counts = self._counts.setdefault(key, Counts())
        self._counts.move_to_end(key)
        if len(self._counts) > _MODELS:
            self._counts.popitem(last=False)
        counts.last = round(time.time() * 1000)
        return counts
