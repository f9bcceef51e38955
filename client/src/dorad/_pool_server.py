"""A pool's state of each server and adapter, and calls to several servers at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dorad import _routing
from dorad import types as t
from dorad._aio.client import Client
from dorad.errors import Cancelled, Conflict, DoradError, Unavailable

T = TypeVar("T")

LACKING = frozenset({"ADAPTER_NOT_FOUND", "ADAPTER_NO_ACTIVE_VERSION", "ADAPTER_NOT_READY"})
"""Reasons of a server that lacks the prompt's version."""


@dataclass
class History:
    """Versions of one adapter that were expected to be active, in order, each as (version, digest).

    During an activation servers may have any of them from `settled` on; otherwise `settled` is the
    last one, which all have.
    """

    versions: list[tuple[int, str]]
    settled: int = 0

    def settle(self) -> None:
        """All servers have the last version."""
        self.settled = len(self.versions) - 1


class Server:
    """One server and its state as seen by the pool."""

    def __init__(self, target: str, client: Client) -> None:
        self.target = target
        self.client = client
        self.state = "unavailable"  # Until it has been asked; else "ready", "stale" or "lacking".
        self.removed = False
        self.completed = self.lost = self.unexpected = 0
        self.latencies: deque[float] = deque(maxlen=256)
        # What a look at it has found last.
        self.versions: Mapping[str, Sequence[t.AdapterVersion]] = {}
        """By adapter."""
        self.behind = 0
        """So many of the fleet's versions were not among them."""
        self.engine: t.EngineInfo | None = None
        """When `_outstanding_then` attempts were out. None: it did not answer."""
        self._outstanding_then = 0
        self._started: dict[int, float] = {}
        self._numbers = itertools.count()

    @property
    def outstanding(self) -> int:
        return len(self._started)

    def tell(self, engine: t.EngineInfo | None) -> None:
        """Notes the state of its engine. None: it does not answer."""
        self.engine, self._outstanding_then = engine, self.outstanding

    @property
    def load(self) -> int:
        """Its sequences and waiting requests, of all callers: what it has told last, with the
        attempts that have begun or ended here since. At least those that are out."""
        told = 0 if self.engine is None else self.queued + self.engine.running_sequences
        return max(self.outstanding, told + self.outstanding - self._outstanding_then)

    @property
    def queued(self) -> int:
        """Requests that wait there, as it has told last."""
        return 0 if self.engine is None else self.engine.queued_requests

    @property
    def kv_use(self) -> float:
        """The share of its KV cache that requests use, likewise."""
        if self.engine is None or not self.engine.kv_pages_total:
            return 0.0
        return self.engine.kv_pages_used / self.engine.kv_pages_total

    @property
    def full(self) -> bool:
        """Whether more work would wait, or take the place of other work."""
        return self.queued > _routing.FULL_QUEUE or self.kv_use > _routing.FULL_KV

    @property
    def latency(self) -> float:
        return statistics.median(self.latencies) if self.latencies else math.nan

    def oldest(self) -> float:
        return time.monotonic() - min(self._started.values()) if self._started else 0.0

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """A block that is one attempt."""
        number, began = next(self._numbers), time.monotonic()
        self._started[number] = began
        try:
            yield
        except Cancelled:
            if self.removed:
                raise unavailable("removed from the pool") from None
            raise
        finally:
            del self._started[number]
        self.completed += 1
        self.latencies.append(time.monotonic() - began)

    async def generate(self, request: t.GenerateRequest, timeout: float | None) -> list[t.Sample]:
        """One attempt."""
        once = self.client._attempts(timeout, 0.0)
        with self.working():
            return await self.client._generate(request, once, self.client._calls, complete=True)


async def gather(
    calls: Mapping[str, Awaitable[T]],
) -> tuple[dict[str, T], dict[str, DoradError]]:
    """Awaits all calls at the same time: (results, failures), each by target."""
    answers = await asyncio.gather(*calls.values(), return_exceptions=True)
    results: dict[str, T] = {}
    failures: dict[str, DoradError] = {}
    for target, answer in zip(calls, answers, strict=True):
        if isinstance(answer, DoradError):
            failures[target] = answer
        elif isinstance(answer, BaseException):  # A mistake of the caller.
            raise answer
        else:
            results[target] = answer
    return results, failures


def conflict(message: str) -> Conflict:
    return Conflict(message, code="FAILED_PRECONDITION")


def unavailable(message: str) -> Unavailable:
    return Unavailable(message, code="UNAVAILABLE", retryable=True)
