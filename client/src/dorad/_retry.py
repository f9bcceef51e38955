"""Retries of failed calls.

gRPC's own retries are off: with them a call of grpcio 1.85 sometimes outlived its deadline after
its server had died. Besides, gRPC does not check whether the server's hint lies beyond the
deadline, and cannot wait for a place in the queue.
"""

from __future__ import annotations

import logging
import random
import threading

from dorad._channel import Budget
from dorad.errors import DoradError, Overloaded

_logger = logging.getLogger("dorad")

MAX_ATTEMPTS = 5
_FIRST_DELAY = 0.1
_LONGEST_DELAY = 5.0
_NOTICED_DELAY = 1.0


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
    _logger.log(level, "%s; trying again in %.1f s", error, delay)


class Throttle:
    """Stops retries from adding to the load when many calls of a client fail. Thread-safe.

    As gRPC's retryThrottling (gRFC A6): a failure takes a token, a success returns half of one, and
    with half of the tokens gone no call is retried.
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
    """The attempts of one call that can be repeated without a second effect.

    Args:
      budget: for all of them together.
      throttle: None: there is one attempt only.
      insist: continue while the server is full, regardless of the other limits.
    """

    def __init__(self, budget: Budget, throttle: Throttle | None, *, insist: bool = False) -> None:
        self.budget = budget
        self._throttle = throttle
        self._insist = insist
        self._answered = False
        self._failures = 0
        self._refusals = 0

    def answered(self) -> None:
        """A message of the answer has arrived. No retry follows: another run would not match it."""
        if not self._answered and self._throttle is not None:
            self._throttle.succeeded()
        self._answered = True

    def delay(self, error: DoradError) -> float | None:
        """Seconds to wait before the next attempt; None: `error` is the call's end."""
        if self._answered or not (error.retryable or self._meets_itself(error)):
            return None
        if self._insist and isinstance(error, Overloaded):
            delay = _wait(error, self._refusals)
            self._refusals += 1
        else:
            if self._throttle is None or not self._throttle.failed():
                return None
            delay = _wait(error, self._failures)
            self._failures += 1
            if self._failures >= MAX_ATTEMPTS:
                return None
        # A wait beyond the call's deadline would be pointless.
        if not self.budget.outlasts(delay):
            return None
        _log(error, delay)
        return delay

    def _meets_itself(self, error: DoradError) -> bool:
        # The connection broke, and the server still has the attempt before.
        return self._failures > 0 and error.reason == "REQUEST_ID_IN_USE"


class UploadAttempts:
    """Retries of an upload, and their offsets. One object for each upload.

    Args:
      budget: for all of them together.
      enabled: False: there is one attempt only.
      size: bytes of the file.
    """

    MAX_FAILURES = 8
    """The number of failures in a row, without progress, that ends an upload. Refusals of a full
    server with a retry hint do not count."""
    _CHEAP_BYTES = 16 << 20  # May be sent again for a file of any size.

    def __init__(self, budget: Budget, enabled: bool, *, size: int) -> None:
        self._budget = budget
        self._enabled = enabled
        self._failures = 0
        self._wasted = 0  # Bytes that the server has not kept.
        self._most_wasted = max(2 * size, self._CHEAP_BYTES)
        self.again = False
        """There was an earlier attempt: the server may have some of the upload."""
        self.offset = 0
        """Offset of the next stream."""

    def delay(self, error: DoradError) -> float | None:
        """Seconds to wait before the next attempt; None: `error` ends the upload."""
        # Bytes of the broken stream may still arrive after the query.
        moved = self.again and error.reason == "PUBLISH_OFFSET_MISMATCH"
        if not self._enabled or not (error.retryable or moved):
            return None
        delay = _wait(error, self._failures)
        if not isinstance(error, Overloaded):
            self._failures += 1
        spent = self._failures >= self.MAX_FAILURES or self._wasted >= self._most_wasted
        if spent or not self._budget.outlasts(delay):
            return None
        self.again = True
        _log(error, delay)
        return delay

    def go_on_at(self, received: int, sent: int) -> None:
        """Continues from the server's number of received bytes."""
        if received > self.offset:
            self._failures = 0
        self._wasted += max(0, sent - received)
        self.offset = received
