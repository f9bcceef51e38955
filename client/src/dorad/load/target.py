"""A load generator's server: dorad's gRPC, or OpenAI's HTTP API."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import dorad
import dorad.aio
from dorad import _wire
from dorad._stubs import types_pb2
from dorad.types import GenerateRequest

# Finish reasons that count as failures, although the status of the stream is OK.
_CUT_SHORT = {
    types_pb2.FINISH_REASON_ABORTED: "ABORTED",
    types_pb2.FINISH_REASON_NON_FINITE: "NON_FINITE",
}


@dataclass(frozen=True)
class Vocabulary:
    """Token ids for random prompts: below `size`, and not `reserved`."""

    size: int
    reserved: frozenset[int] = frozenset()


class Piece(NamedTuple):
    """One message of an answer."""

    sample: int
    tokens: int
    failure: str = ""
    """Reason of a sample that was cut short."""


class Connection(Protocol):
    """Reaches the server. Used by one event loop."""

    async def vocabulary(self) -> Vocabulary:
        """Raises DoradError."""

    def stream(self, request: GenerateRequest) -> AsyncGenerator[Piece, None]:
        """The messages of an answer as they come. Raises DoradError."""


class Target(Protocol):
    """Where to send the load. Can be pickled."""

    def connect(self) -> contextlib.AbstractAsyncContextManager[Connection]: ...


@dataclass(frozen=True)
class Grpc:
    """A dorad server."""

    target: str
    admin_target: str | None = None
    timeout: float = 600.0

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        # Local subchannel pools: otherwise clients of one target share a connection. No retries:
        # they would hide refusals, which are results.
        async with dorad.aio.Client(
            self.target,
            admin_target=self.admin_target,
            timeout=self.timeout,
            retry_for=0,
            options=[("grpc.use_local_subchannel_pool", 1)],
        ) as client:
            yield _GrpcConnection(client)


class _GrpcConnection:
    def __init__(self, client: dorad.aio.Client) -> None:
        self._client = client

    async def vocabulary(self) -> Vocabulary:
        model = (await self._client.info()).model
        return Vocabulary(model.vocab_size, frozenset(model.eos_token_ids))

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Piece, None]:
        # Raw messages: converting them would cost more than all other work here.
        written = _wire.generate_request(request, stream=True)
        async with self._client._stream(written, lambda message: message) as stream:
            async for message in stream:
                failure = ""
                if message.HasField("finish"):
                    failure = _CUT_SHORT.get(message.finish.reason, "")
                yield Piece(message.sample_index, len(message.token_ids) // 4, failure)
