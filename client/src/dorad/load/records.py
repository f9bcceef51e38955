"""Records of one process: its requests, CPU time and event loop lag."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

_BEAT = 0.02  # Seconds between measurements of the event loop lag.


@dataclass(slots=True)
class Record:
    """One request. Times are seconds of the monotonic clock."""

    adapter: str | None
    prompt_tokens: int
    start: float
    """Planned arrival (open loop) or time of sending (closed loop)."""
    sent: float
    ttft: float | None = None
    gaps: list[tuple[float, int]] = field(default_factory=list)
    """(gap, tokens): a later message of a sample with k tokens counts as k equal gaps."""
    longest_gap: float = 0.0
    tokens: int = 0
    timely_tokens: int = 0
    """Tokens received within the plan's duration."""
    messages: int = 0
    end: float = 0.0
    error: str = ""
    refused: bool = False
    """The server refused the request with a reason. Not a failure."""
    retry_after: float | None = None
    """The server's retry hint in seconds, with an error."""


@dataclass(slots=True)
class Outcome:
    """The result of one process. It is sent to the parent process."""

    records: list[Record]
    """All requests, including the warm-up."""
    began: float
    """End of the warm-up."""
    ended: float
    cpu_seconds: float
    """CPU time of this process since `began`."""
    lags: list[float]
    """Event loop lags in seconds since `began`."""


class SelfWatch:
    """Measures the CPU time and the event loop lag of this process."""

    def __init__(self) -> None:
        self._cpu = time.process_time()
        self.lags: list[float] = []

    def reset(self) -> None:
        """Starts the measurement again, after the warm-up."""
        self._cpu = time.process_time()
        self.lags = []

    def cpu_seconds(self) -> float:
        return time.process_time() - self._cpu

    async def run(self) -> None:
        """Measures until it is cancelled."""
        while True:
            due = time.monotonic() + _BEAT
            await asyncio.sleep(_BEAT)
            self.lags.append(max(0.0, time.monotonic() - due))
