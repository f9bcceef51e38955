"""Errors of the gateway and of the server as HTTP statuses and bodies."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from dorad.errors import DoradError, Violation

_STATUS = {
    "INVALID_ARGUMENT": 400,
    "OUT_OF_RANGE": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ABORTED": 409,
    "ALREADY_EXISTS": 409,
    "FAILED_PRECONDITION": 409,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
_PARAMS = {
    "logprobs.top_k": "logprobs",  # top_k is another field.
    "drafts": "drafts",
    "sampling.logit_biases": "logit_bias",
    "sampling.logit_bias_token_ids": "logit_bias",
}
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class Refusal(Exception):
    """An error answer.

    Attributes:
      status: HTTP status code.
      reason: stable UPPER_SNAKE code (docs/guides/gateway.md), the `code` of OpenAI's error object.
      param: the invalid field, or None.
      retry_after: seconds, or None.
    """

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        *,
        param: str | None = None,
        violations: Iterable[Violation] = (),
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message
        self.param = param
        self.violations = list(violations)
        self.retry_after = retry_after

    @classmethod
    def of(cls, error: DoradError) -> Refusal:
        """A failed gRPC call, with the server's reason and violations."""
        path = error.violations[0].field if error.violations else ""
        return cls(
            _STATUS.get(error.code, 500),
            error.reason or error.code,
            error.message,
            # The server's path, "sampling.top_p", is "top_p" here.
            param=_PARAMS.get(path.partition("[")[0], path.rpartition(".")[2]) or None,
            violations=error.violations,
            retry_after=error.retry_after,
        )

    def body(self) -> dict[str, Any]:
        """OpenAI's error object, and all violations."""
        kind = _TYPES.get(self.status)
        if kind is None:
            kind = "invalid_request_error" if self.status < 500 else "server_error"
        found: dict[str, Any] = {
            "message": self.message,
            "type": kind,
            "param": self.param,
            "code": self.reason,
        }
        if self.violations:
            found["violations"] = [
                {"field": v.field, "reason": v.reason, "description": v.description}
                for v in self.violations
            ]
        return {"error": found}

    def headers(self) -> dict[str, str]:
        """Retry-After in whole seconds, and retry-after-ms in milliseconds for OpenAI's clients."""
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after)))
            headers["retry-after-ms"] = str(max(1, math.ceil(self.retry_after * 1000)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def as_refusal(error: Refusal | DoradError) -> Refusal:
    return error if isinstance(error, Refusal) else Refusal.of(error)
