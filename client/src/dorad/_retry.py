"""Retries of failed calls.

gRPC's own retries are off: with them a call of grpcio 1.85 sometimes outlived its deadline after
its server had died. Besides, gRPC does not check whether the server's hint lies beyond the
deadline, and cannot wait for a place in the queue or for a restart.
"""

from __future__ import annotations

import logging
import math
import os
import random
import threading
import time

from dorad._arguments import as_seconds
from dorad._channel import Budget
from dorad.errors import DeadlineExceeded, DoradError, Overloaded, Unavailable

_logger = logging.getLogger("dorad")

_FIRST_DELAY = 0.1
_LONGEST_DELAY = 5.0
_NOTICED_DELAY = 1.0


def check_retry_for(seconds: float, name: str = "retry_for") -> float:
    """Raises TypeError or ValueError unless it is a time."""
    if not as_seconds(seconds, name) >= 0:
        raise ValueError(f"{name} must be 0 or more seconds, not {seconds}")
    return float(seconds)


def default_retry_for(seconds: float | None) -> float | None:
    """The client's argument, or else DORAD_RETRY_FOR. None: neither is given."""
    if seconds is not None:
        return check_retry_for(seconds)
    text = os.environ.get("DORAD_RETRY_FOR")
    if not text:
        return None
    try:
        return check_retry_for(float(text), "DORAD_RETRY_FOR")
    except ValueError:
        raise ValueError(f"DORAD_RETRY_FOR must be 0 or more seconds, not {text!r}") from None


def backoff(failures: int) -> float:
    """Seconds after `failures` in a row, without a hint from the server."""
    return min(_LONGEST_DELAY, _FIRST_DELAY * 2.0 ** min(failures, 10))


def _wait(error: DoradError, failures: int) -> float:
    """Seconds before the next attempt: never before the server's hint, with jitter against
    simultaneous retries."""
    if error.retry_after is not None:
        return max(error.retry_after, 0.01) * random.uniform(1.0, 1.25)
    return backoff(failures) * random.uniform(0.75, 1.25)


def _log(error: DoradError, delay: float) -> None:
    """INFO for a noticeable wait."""
    level = logging.INFO if delay >= _NOTICED_DELAY else logging.DEBUG
    _logger.log(level, "%s; trying again in %.1f s", str(error), delay)


def _had_no_effect(error: DoradError) -> bool:
    """Whether the server certainly did nothing: it was not reached, or it refused with a reason."""
    return bool(error.reason) or error.message.startswith("failed to connect")


class Throttle:
    """Stops retries from adding to the load when many calls of a client fail. Thread-safe.

    As gRPC's retryThrottling (gRFC A6): a failure takes a token, a success returns half of one, and
    with half of the tokens gone no call is retried. Only for calls without `retry_for`.
    """

    _TOKENS = 100.0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens = self._TOKENS

    def failed(self) -> bool:
        """Whether a retry is allowed."""
        with self._lock:
            self._tokens = max(0.0, self._tokens - 1.0)
            return self._tokens > self._TOKENS / 2

    def succeeded(self) -> None:
        with self._lock:
            self._tokens = min(self._TOKENS, self._tokens + 0.5)


class Attempts:
    """The attempts of one call: whether and when a failed one is repeated.

    Args:
      budget: the call's timeout, for all attempts together.
      retry_for: the last attempt begins at most so many seconds after the first failure; 0: one
        attempt; math.inf: until the timeout; None: at most `MAX_FAILURES` attempts.
      throttle: also limits the attempts without `retry_for`.
      effects: a second attempt could have a second effect. It follows with `retry_for` only, after
        a failure that certainly had none.
    """

    MAX_FAILURES = 5
    """End a call without `retry_for`."""

    def __init__(
        self,
        budget: Budget,
        retry_for: float | None,
        throttle: Throttle | None = None,
        *,
        effects: bool = False,
    ) -> None:
        self.budget = budget
        self._retry_for = retry_for
        self._throttle = throttle
        self._effects = effects
        self._began = time.monotonic()
        self._first_failure = math.nan
        self._count = 0
        self._failures = 0
        self._answered = False
        self._broken = False
        self._cause: DoradError | None = None

    def answered(self) -> None:
        """The caller has a message of the answer. No retry follows: another run would not match."""
        if not self._answered and self._throttle is not None:
            self._throttle.succeeded()
        self._answered = True

    def failed(self, error: DoradError) -> None:
        """Notes a failure, also one that no wait follows: another server is asked."""
        self._broken |= isinstance(error, Unavailable)

    def delay(self, error: DoradError) -> float | None:
        """Seconds to wait before the next attempt; None: `error` ends the call, and tells in
        `effort` how often the call was tried."""
        self._count += 1
        self.failed(error)
        if self._answered or self._retry_for == 0 or not self._may_succeed(error):
            if isinstance(error, DeadlineExceeded) and self._cause is not None:
                cause = f"{self._cause.code}: {self._cause.message}"
                error.effort = f"{self._effort()}, the one before ended with {cause}"
            return None
        if self._cause is None:
            self._first_failure = time.monotonic()
        self._cause = error
        delay, limit = self._next(error)
        if limit:
            error.effort = f"gave up after {self._effort()}: {limit}"
            return None
        _log(error, delay)
        return delay

    def _effort(self) -> str:
        attempts = "1 attempt" if self._count == 1 else f"{self._count} attempts"
        return f"{attempts} in {time.monotonic() - self._began:.1f} s"

    def _may_succeed(self, error: DoradError) -> bool:
        """Whether another attempt can succeed, and has no second effect."""
        if self._effects and (self._retry_for is None or not _had_no_effect(error)):
            return False
        return error.retryable or self.meets_itself(error)

    def meets_itself(self, error: DoradError) -> bool:
        """Whether the connection broke, and the server still runs an attempt before."""
        return self._broken and error.reason == "REQUEST_ID_IN_USE"

    def _counts(self, error: DoradError) -> bool:
        """Whether the failure counts for the backoff and `MAX_FAILURES`."""
        return True

    def _next(self, error: DoradError) -> tuple[float, str]:
        """Seconds before the next attempt, and the limit that forbids it, or ""."""
        delay = _wait(error, self._failures)
        self._failures += self._counts(error)
        if self._retry_for is not None:
            left = self._first_failure + self._retry_for - time.monotonic()
            if error.retry_after is None:  # The last attempt begins as the time ends.
                delay = min(delay, max(0.0, left))
            if left <= 0 or delay > left:
                return delay, f"the next one would exceed retry_for={self._retry_for:g}"
        elif self._throttle is not None and not self._throttle.failed():
            return delay, "too many calls of this client fail"
        elif self._failures >= self.MAX_FAILURES:
            return delay, "retry_for allows more"
        # A wait beyond the call's deadline would be pointless.
        if not self.budget.outlasts(delay):
            return delay, f"the next one would exceed timeout={self.budget.seconds:g}"
        return delay, ""


class UploadAttempts(Attempts):
    """The attempts of an upload, and their offsets.

    Args:
      size: bytes of the file.
    """

    MAX_FAILURES = 8
    """Failures in a row, without progress. Refusals of a full server with a retry hint do not
    count."""
    _CHEAP_BYTES = 16 << 20  # May be sent again for a file of any size.

    def __init__(self, budget: Budget, retry_for: float | None, *, size: int) -> None:
        super().__init__(budget, retry_for)
        self._wasted = 0  # Bytes that the server has not kept.
        self._most_wasted = max(2 * size, self._CHEAP_BYTES)
        self.again = False
        """There was an earlier attempt: the server may have some of the upload."""
        self.offset = 0
        """Offset of the next stream."""

    def delay(self, error: DoradError) -> float | None:
        delay = super().delay(error)
        self.again = self.again or delay is not None
        return delay

    def _may_succeed(self, error: DoradError) -> bool:
        # Bytes of the broken stream may still arrive after the query.
        moved = self.again and error.reason == "PUBLISH_OFFSET_MISMATCH"
        return error.retryable or moved

    def _counts(self, error: DoradError) -> bool:
        return not isinstance(error, Overloaded)

    def _next(self, error: DoradError) -> tuple[float, str]:
        delay, limit = super()._next(error)
        if not limit and self._wasted >= self._most_wasted:
            limit = f"the server has not kept {self._wasted} bytes"
        return delay, limit

    def go_on_at(self, received: int, sent: int) -> None:
        """Continues from the server's number of received bytes."""
        if received > self.offset:
            self._failures = 0
            self._cause = None
        self._wasted += max(0, sent - received)
        self.offset = received
