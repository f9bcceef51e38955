"""Who asks: what of a request goes on to the server with each of its calls."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

_TOKEN = re.compile(r"bearer ([\x21-\x7e]+)", re.IGNORECASE)
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
    authorization: str = ""
    """As it goes on to the server; "": it brings no token."""
    token_problem: str = ""
    """Why nobody can tell whose token it brings; "": it brings one or none."""

    def call_id(self) -> str:
        """For one call on the server: unique, where a caller may use its own id twice at a time."""
        return f"{self.request_id}-{secrets.token_hex(4)}"


def caller_of(pairs: Iterable[tuple[str, str]]) -> Caller:
    """From headers, lower-case names. Of ids and traces what is malformed is left out."""
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
    """The token, or what is wrong with it. As strict as the server, which sees one value at most:
    of several one could be a proxy's, and without a malformed one the caller would be another."""
    if not values:
        return "", ""
    if len(values) > 1:
        return "", "the request brings more than one authorization"
    match = _TOKEN.fullmatch(values[0])
    return ("", "authorization must be Bearer TOKEN") if match is None else (match[1], "")
