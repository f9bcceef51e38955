"""Who asks: what of an HTTP request goes on to the server with each of its calls."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

_TOKEN = re.compile(r"[Bb]earer ([\x21-\x7e]+)")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[\x21-\x7e]*)?")
_TRACESTATE = re.compile(r"[\x20-\x7e]{1,512}")


@dataclass(frozen=True, slots=True)
class Caller:
    """One request's sender."""

    metadata: tuple[tuple[str, str], ...]
    """For the gRPC calls made on its behalf: its own token and trace, never the gateway's."""
    request_id: str
    """As the caller chose it, or made here; in the answer's x-request-id."""

    def call_id(self) -> str:
        """For one call on the server: unique, where a caller may use its own id twice at a time."""
        return f"{self.request_id}-{secrets.token_hex(4)}"


def caller_of(headers: Mapping[str, str]) -> Caller:
    """From headers (lower-case names, last value of each). What is malformed is left out."""
    given = headers.get("x-request-id", "")
    request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
    metadata = [("x-request-id", request_id)]
    if match := _TOKEN.fullmatch(headers.get("authorization", "")):
        metadata.append(("authorization", f"Bearer {match[1]}"))
    if _TRACEPARENT.fullmatch(parent := headers.get("traceparent", "")):
        metadata.append(("traceparent", parent))
        if _TRACESTATE.fullmatch(state := headers.get("tracestate", "")):
            metadata.append(("tracestate", state))
    return Caller(tuple(metadata), request_id)
