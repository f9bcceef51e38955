"""Whether the server knows a caller, asked before the gateway itself does anything for one."""

from __future__ import annotations

import hashlib

import dorad
import dorad.aio
from dorad.gateway.answers import Answers
from dorad.gateway.callers import Caller
from dorad.gateway.errors import Refusal

_SECONDS = 5.0  # How long a token that was taken out may still learn the model's facts.
_REMEMBERED = 4096  # Tokens; callers choose them.

OPEN_TO_ALL = (
    "the server takes calls without a token over this connection, and the gateway listens beyond "
    "the loopback: have the server ask for tokens (and list no certificate of the gateway's), or "
    "say --allow-insecure"
)


class Admission:
    """What the server said to whom, for a few seconds. For one event loop.

    Calls of a caller are judged by the server anyhow: this is for what the gateway answers from
    what it knows, and for the work it does before the first call.

    Args:
      exposed: others can reach the gateway, so that it must not stand before a server that takes
        calls of everyone.
    """

    def __init__(self, own: dorad.aio.Client, *, exposed: bool = False) -> None:
        self._own = own
        self._exposed = exposed
        # By digest: the gateway keeps nobody's token. None: accepted.
        self._said: Answers[bytes, dorad.PermissionDenied | None] = Answers(
            seconds=_SECONDS, most=_REMEMBERED
        )

    async def admit(self, caller: Caller) -> None:
        """Raises Refusal, or DoradError: what the server says to this caller, or its silence."""
        if caller.token_problem:
            raise Refusal(401, "TOKEN_INVALID", caller.token_problem)
        # Where everyone may call, tokens mean nothing and are not asked about one by one.
        refused = await self._refused("")
        if refused is None and self._exposed:
            raise Refusal(503, "SERVER_OPEN", OPEN_TO_ALL)
        if refused is not None and caller.authorization:
            refused = await self._refused(caller.authorization)
        if refused is not None:
            # The same object for all: without this its traceback would grow with each.
            raise refused.with_traceback(None)

    async def is_open(self) -> bool:
        """Whether the server takes calls of everyone; False if it cannot be asked now."""
        try:
            return await self._refused("") is None
        except dorad.DoradError:
            return False

    async def _refused(self, authorization: str) -> dorad.PermissionDenied | None:
        """Why the server does not take calls with it ("": with none). None: it does."""

        async def ask() -> dorad.PermissionDenied | None:
            metadata = (("authorization", authorization),) if authorization else ()
            try:
                # Every role may call it.
                await self._own.with_metadata(metadata).info(timeout=5)
            except dorad.PermissionDenied as error:
                return error
            return None

        return await self._said.get(hashlib.sha256(authorization.encode()).digest(), ask)
