"""Asks a server whether it accepts a caller, before the gateway works for that caller."""

from __future__ import annotations

import hashlib

import dorad
from dorad.gateway.answers import Answers
from dorad.gateway.callers import Caller
from dorad.gateway.errors import Refusal
from dorad.gateway.servers import Servers

_SECONDS = 5.0  # A removed token can still read the model's facts for this long.
_REMEMBERED = 4096  # Tokens. Callers choose them, so the number must be bounded.

OPEN_TO_ALL = (
    "the server takes calls without a token over this connection, and the gateway listens beyond "
    "the loopback: configure tokens on the server (and do not list the gateway's certificate "
    "there), or pass --allow-insecure"
)


class Admission:
    """Caches for some seconds which tokens the servers accept. Use it from one event loop.

    All servers are expected to accept the same tokens: one of them is asked. Each checks every call
    of a caller. This check protects the answers that the gateway gives from its own memory, and its
    work before the first call.

    Args:
      exposed: other hosts can reach the gateway. It then refuses callers while the server accepts
        calls without a token, if only one of them does.
    """

    def __init__(self, servers: Servers, *, exposed: bool = False) -> None:
        self._servers = servers
        self._exposed = exposed
        # Keys are digests, so that no token stays in memory. None: accepted.
        self._said: Answers[bytes, dorad.PermissionDenied | None] = Answers(
            seconds=_SECONDS, most=_REMEMBERED
        )

    async def admit(self, caller: Caller) -> None:
        """Raises Refusal or DoradError when the server refuses the caller or does not answer."""
        if caller.token_problem:
            raise Refusal(401, "TOKEN_INVALID", caller.token_problem)
        # A server that accepts calls without a token ignores tokens, so they need no check.
        refused = await self._refused("")
        if refused is None and self._exposed:
            raise Refusal(503, "SERVER_OPEN", OPEN_TO_ALL)
        if refused is not None and caller.authorization:
            refused = await self._refused(caller.authorization)
        if refused is not None:
            # All callers get this object. Its traceback would grow with each raise.
            raise refused.with_traceback(None)

    async def is_open(self) -> bool:
        """Whether the server accepts calls without a token. False if it does not answer."""
        try:
            return await self._refused("") is None
        except dorad.DoradError:
            return False

    async def _refused(self, authorization: str) -> dorad.PermissionDenied | None:
        """Why the server refuses this header value ("": no token). None: it accepts it."""

        async def ask() -> dorad.PermissionDenied | None:
            if not authorization:
                return await self._servers.of(()).accepted_by_any()
            try:
                # Every role may call GetInfo.
                await self._servers.of((("authorization", authorization),)).info(timeout=5)
            except dorad.PermissionDenied as error:
                return error
            return None

        return await self._said.get(hashlib.sha256(authorization.encode()).digest(), ask)
