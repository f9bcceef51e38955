"""When a call that failed is sent again.

The client decides this itself, with gRPC's own retries off: with them a call of grpcio 1.85 now and
then outlived its deadline after its server had died. Besides, gRPC knows neither when the server's
hint lies beyond the deadline nor that somebody waits for a place in the queue.
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
    """Seconds after so many failures in a row, when the server gave no hint."""
    return min(_LONGEST_DELAY, _FIRST_DELAY * 2.0 ** min(failures, 10))


def _wait(error: DoradError, failures: int) -> float:
    """Seconds before the next attempt: never before the server's hint; and callers who were refused
    together come back apart."""
    if error.retry_after is not None:
        return max(error.retry_after, 0.01) * random.uniform(1.0, 1.25)
    return backoff(failures) * random.uniform(0.75, 1.25)


def _log(error: DoradError, delay: float) -> None:
    """INFO for a wait that people notice."""
    level = logging.INFO if delay >= _NOTICED_DELAY else logging.DEBUG
    _logger.log(level, "%s; trying again in %.1f s", error, delay)


class Throttle:
    """Stops retries from adding to the load when many calls of a client fail. Thread-safe.

    As gRPC's retryThrottling (gRFC A6): a failure takes a token, a success brings half of one, and
    with half of the tokens gone nothing is sent again.
    """

    _TOKENS = 100.0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens = self._TOKENS

    def failed(self) -> bool:
        """Whether a retry is fine."""
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
      insist: go on for as long as the server is full, whatever the rest says.
    """

    def __init__(self, budget: Budget, throttle: Throttle | None, *, insist: bool = False) -> None:
        self.budget = budget
        self._throttle = throttle
        self._insist = insist
        self._answered = False
        self._failures = 0
        self._refusals = 0

    def answered(self) -> None:
        """A message of the answer has come. Nothing is sent again: another run would not fit it."""
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
        # What ends no later than the call does is worth waiting for; the rest is known now.
        if not self.budget.outlasts(delay):
            return None
        _log(error, delay)
        return delay

    def _meets_itself(self, error: DoradError) -> bool:
        # The connection broke, and the server has not let go of the attempt before.
        return self._failures > 0 and error.reason == "REQUEST_ID_IN_USE"


class UploadAttempts:
    """When an upload is tried again, and from where. One object for each upload.

    Args:
      budget: for all of them together.
      enabled: False: there is one attempt only.
      size: bytes of the image.
    """

    MAX_FAILURES = 8
    """Failures in a row, without one byte of progress, that end an upload; of a server that is full
    and says when to come back none counts."""
    _CHEAP_BYTES = 16 << 20  # They may be sent in vain whatever the image's size is.

    def __init__(self, budget: Budget, enabled: bool, *, size: int) -> None:
        self._budget = budget
        self._enabled = enabled
        self._failures = 0
        self._wasted = 0  # Bytes that the server has not kept.
        self._most_wasted = max(2 * size, self._CHEAP_BYTES)
        self.again = False
        """There was an attempt before: the server may have some of the upload."""
        self.offset = 0
        """Where the next stream goes on."""

    def delay(self, error: DoradError) -> float | None:
        """Seconds to wait before the next attempt; None: `error` ends the upload."""
        # What the broken stream had sent may still arrive after the server was asked.
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
        """Takes over what the server has of all that was sent."""
        if received > self.offset:
            self._failures = 0
        self._wasted += max(0, sent - received)
        self.offset = received
