"""What one process saw: its requests, and itself."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

_BEAT = 0.02  # Seconds between looks at the event loop.


@dataclass(slots=True)
class Record:
    """One request as the client saw it; times in seconds of the monotonic clock."""

    adapter: str | None
    prompt_tokens: int
    start: float
    """When it was due (open loop) or sent (closed loop)."""
    sent: float
    ttft: float | None = None
    gaps: list[tuple[float, int]] = field(default_factory=list)
    """(gap, tokens): a message of k tokens after a sample's first counts as k equal gaps."""
    longest_gap: float = 0.0
    tokens: int = 0
    timely_tokens: int = 0
    """Those of `tokens` that came within the plan's duration."""
    messages: int = 0
    end: float = 0.0
    error: str = ""
    refused: bool = False
    """The server did not accept it, and said why; not a failure."""
    retry_after: float | None = None
    """With an error: the server's hint."""


@dataclass(slots=True)
class Outcome:
    """All that one process has to say; travels between processes."""

    records: list[Record]
    """Of all requests, warm-up and all."""
    began: float
    """The end of the warm-up."""
    ended: float
    cpu_seconds: float
    """Of this process since `began`."""
    lags: list[float]
    """How late the event loop came to its timers, since `began`."""


class SelfWatch:
    """Watches this process: its CPU time, and how late its event loop comes to its timers."""

    def __init__(self) -> None:
        self._cpu = time.process_time()
        self.lags: list[float] = []

    def reset(self) -> None:
        """The warm-up is over."""
        self._cpu = time.process_time()
        self.lags = []

    def cpu_seconds(self) -> float:
        return time.process_time() - self._cpu

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            due = time.monotonic() + _BEAT
            await asyncio.sleep(_BEAT)
            self.lags.append(max(0.0, time.monotonic() - due))
