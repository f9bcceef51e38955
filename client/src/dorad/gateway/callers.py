"""The caller of a request: its token, request id and trace context."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

_TOKEN = re.compile(r"bearer ([\x21-\x7e]+)", re.IGNORECASE)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[\x21-\x7e]*)?")
_TRACESTATE = re.compile(r"[\x20-\x7e]{1,512}")


@dataclass(slots=True)
class Record:
    """Facts about one request for the access log. None holds text of a prompt or an answer."""

    peer: str = ""
    model: str = ""
    reason: str = ""
    """Why the request failed."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    received_bytes: int = 0
    """Of the body."""
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of one request."""

    metadata: tuple[tuple[str, str], ...]
    """Metadata for gRPC calls on its behalf: the caller's token and trace, never the gateway's."""
    request_id: str
    """The caller's own or a new one. Returned as x-request-id."""
    authorization: str = ""
    """The header value for the server. "": no token."""
    token_problem: str = ""
    """Why the authorization is invalid. "": it is valid or absent."""
    record: Record = field(default_factory=Record, compare=False)

    def call_id(self) -> str:
        """A unique id for one call. Callers may use the same request id twice."""
        return f"{self.request_id}-{secrets.token_hex(4)}"


def caller_of(pairs: Iterable[tuple[str, str]]) -> Caller:
    """Reads headers (lower-case names). Malformed ids and traces are ignored."""
    pairs = list(pairs)
    headers = dict(pairs)
    given = headers.get("x-request-id", "")
    request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
    metadata = [("x-request-id", request_id)]
    token, token_problem = _token([value for name, value in pairs if name == "authorization"])
    authorization = f"Bearer {token}" if token else ""
    if authorization:
        metadata.append(("authorization", authorization))
    if _TRACEPARENT.fullmatch(parent := headers.get("traceparent", "")):
        metadata.append(("traceparent", parent))
        if _TRACESTATE.fullmatch(state := headers.get("tracestate", "")):
            metadata.append(("tracestate", state))
    return Caller(tuple(metadata), request_id, authorization, token_problem)


def _token(values: list[str]) -> tuple[str, str]:
    """Returns (token, problem). One of several headers could be a proxy's, and a malformed one
    must not turn its sender into an anonymous caller: both are refused."""
    if not values:
        return "", ""
    if len(values) > 1:
        return "", "the request has more than one authorization header"
    match = _TOKEN.fullmatch(values[0])
    return ("", "authorization must be Bearer TOKEN") if match is None else (match[1], "")
