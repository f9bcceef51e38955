"""Exceptions by the caller's possible reaction, decoded from the server's error details.

Every failed call raises a `DoradError`. `reason` is a stable UPPER_SNAKE code
(docs/reference/errors.md): test it rather than the message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

_DETAILS_KEY = "grpc-status-details-bin"
_PUSHBACK_KEY = "grpc-retry-pushback-ms"


@dataclass(frozen=True, slots=True)
class Violation:
    """One problem of a request or an adapter."""

    field: str
    description: str
    reason: str = ""

    @property
    def text(self) -> str:
        """Without the reason."""
        return f"{self.field}: {self.description}" if self.field else self.description

    def __str__(self) -> str:
        return f"{self.text} [{self.reason}]" if self.reason else self.text


def _without_repetition(message: str, violations: list[Violation]) -> tuple[str, list[Violation]]:
    """A message and the violations to print below it. The server's message has the first ones, too,
    for those who see nothing else."""
    subject, found, _ = message.partition(violations[0].text) if violations else ("", "", "")
    if not found:
        return message, violations
    if len(violations) == 1:
        return message, []
    return f"{subject}{len(violations)} problems", violations


class DoradError(Exception):
    """A call failed.

    Attributes:
      code: gRPC status code in upper case, for example "INVALID_ARGUMENT".
      reason: stable reason code, "" without one (as for transport failures).
      message: one sentence for people.
      violations: all problems of a refused request or adapter.
      retry_after: seconds to wait before trying again, or None.
      retryable: the same call may succeed later: the server cannot be reached or is shutting
        down, or is full and sends a retry hint.
      effort: the number of attempts and the limit that ended them, or "" after a single one.
      results: from generate_many: for each prompt its samples, its error, or None if it had not
        finished. Else None.
      metadata: further facts about the reason.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "UNKNOWN",
        reason: str = "",
        violations: Iterable[Violation] = (),
        retry_after: float | None = None,
        retryable: bool = False,
        metadata: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.reason = reason
        self.violations = list(violations)
        self.retry_after = retry_after
        self.retryable = retryable
        self.effort = ""
        self.results: list[Any] | None = None
        self.metadata = dict(metadata or {})

    def __str__(self) -> str:
        head = f"{self.code} ({self.reason})" if self.reason else self.code
        message, listed = _without_repetition(self.message, self.violations)
        lines = [f"{head}: {message}" + (f"; {self.effort}" if self.effort else "")]
        lines += [f"  - {violation}" for violation in listed]
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions with keyword-only arguments do not pickle by themselves; worker pools need it.
        return (_rebuild, (type(self), self.message), self.__dict__.copy())


def _rebuild(cls: type[DoradError], message: str) -> DoradError:
    return cls(message)


class InvalidArgument(DoradError):
    """The request can never succeed as it is (INVALID_ARGUMENT, OUT_OF_RANGE)."""


class NotFound(DoradError):
    """No such adapter, version, path or request (NOT_FOUND)."""


class Conflict(DoradError):
    """The state of the server does not allow it (ABORTED, ALREADY_EXISTS, FAILED_PRECONDITION)."""

    @property
    def current_generation(self) -> int | None:
        """The registry's generation, if `expected_generation` was another; else None."""
        generation = self.metadata.get("current_generation")
        return None if generation is None else int(generation)


class Overloaded(DoradError):
    """A limit of the server is reached (RESOURCE_EXHAUSTED); try again after `retry_after`."""


class Unavailable(DoradError):
    """The server cannot be reached or is shutting down (UNAVAILABLE)."""


class DeadlineExceeded(DoradError):
    """The call's timeout passed (DEADLINE_EXCEEDED)."""


class Cancelled(DoradError):
    """The call was cancelled (CANCELLED)."""


class PermissionDenied(DoradError):
    """The server refuses this caller or path (PERMISSION_DENIED, UNAUTHENTICATED)."""


class Unimplemented(DoradError):
    """The server does not offer this call (UNIMPLEMENTED)."""


class Internal(DoradError):
    """The server failed (INTERNAL, UNKNOWN, DATA_LOSS) or answered against its contract."""


class UnexpectedVersion(DoradError):
    """A server of a pool answered with another version than the pool's active one."""


class PoolError(DoradError):
    """A change failed on some servers of a pool.

    Attributes:
      failures: the error of each target that failed or did not answer in time.
      not_rolled_back: after a failed activation: targets that could not be set back to their
        version before, and the errors.
    """

    def __init__(
        self,
        message: str,
        failures: Mapping[str, DoradError] | None = None,
        not_rolled_back: Mapping[str, DoradError] | None = None,
    ) -> None:
        super().__init__(message, code="ABORTED")
        self.failures = dict(failures or {})
        self.not_rolled_back = dict(not_rolled_back or {})

    def __str__(self) -> str:
        lines = [super().__str__()]
        lines += [f"  {target}: {error}" for target, error in self.failures.items()]
        for target, error in self.not_rolled_back.items():
            lines.append(f"  {target} is not rolled back: {error}")
        return "\n".join(lines)


_BY_CODE: dict[str, type[DoradError]] = {
    "INVALID_ARGUMENT": InvalidArgument,
    "OUT_OF_RANGE": InvalidArgument,
    "NOT_FOUND": NotFound,
    "ABORTED": Conflict,
    "ALREADY_EXISTS": Conflict,
    "FAILED_PRECONDITION": Conflict,
    "RESOURCE_EXHAUSTED": Overloaded,
    "UNAVAILABLE": Unavailable,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": Cancelled,
    "PERMISSION_DENIED": PermissionDenied,
    "UNAUTHENTICATED": PermissionDenied,
    "UNIMPLEMENTED": Unimplemented,
    "INTERNAL": Internal,
    "UNKNOWN": Internal,
    "DATA_LOSS": Internal,
}


def _details(metadata: Any) -> status_pb2.Status:
    status = status_pb2.Status()
    for key, value in metadata or ():
        if key == _DETAILS_KEY:
            try:
                status.ParseFromString(value)
            except DecodeError:  # A proxy's garbage must not hide the error itself.
                return status_pb2.Status()
    return status


def _pushback(metadata: Any) -> float | None:
    """Seconds; negative: no retry. As in gRPC (gRFC A6), malformed text counts as negative."""
    for key, value in metadata or ():
        if key == _PUSHBACK_KEY:
            try:
                return int(value) / 1000
            except ValueError:
                return -1.0
    return None


def from_code(code: int, reason: str, message: str) -> DoradError:
    """The exception for a failure without a gRPC call, by the number of its gRPC code."""
    names = {status.value[0]: status.name for status in grpc.StatusCode}
    name = names.get(code, "UNKNOWN")
    return _BY_CODE.get(name, DoradError)(message, code=name, reason=reason)


def from_rpc_error(error: grpc.RpcError) -> DoradError:
    """The exception for a failed gRPC call (sync or asyncio)."""
    code = error.code()
    name = code.name if code is not None else "UNKNOWN"
    if name == "CANCELLED" and error.details() in (None, "", name):
        # Without a status: a server that ends resets the calls that have just arrived.
        name, message = "UNAVAILABLE", "the server reset the call"
    else:
        message = error.details() or name.lower().replace("_", " ")
    reason, retry_after = "", None
    facts: dict[str, str] = {}
    violations: list[Violation] = []
    for any_detail in _details(error.trailing_metadata()).details:
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if any_detail.Unpack(info):
            reason, facts = info.reason, dict(info.metadata)
        elif any_detail.Unpack(bad):
            violations += [
                Violation(v.field, v.description, getattr(v, "reason", ""))
                for v in bad.field_violations
            ]
        elif any_detail.Unpack(retry):
            retry_after = retry.retry_delay.ToTimedelta().total_seconds()
    pushback = _pushback(error.trailing_metadata())
    if retry_after is None and pushback is not None and pushback >= 0:
        retry_after = pushback
    forbidden = pushback is not None and pushback < 0
    full = name == "RESOURCE_EXHAUSTED" and retry_after is not None
    return _BY_CODE.get(name, DoradError)(
        message,
        code=name,
        reason=reason,
        violations=violations,
        retry_after=retry_after,
        retryable=not forbidden and (full or name == "UNAVAILABLE"),
        metadata=facts,
    )
