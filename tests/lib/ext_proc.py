"""A proxy's side of Envoy's external processing."""

import contextlib
import json
import queue
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from dorad.gateway import external_processing_pb2 as pb
from dorad.gateway.external_processing_pb2_grpc import ExternalProcessorStub
from grpc_health.v1.health_pb2_grpc import HealthStub

from lib.gateway import running_gateway

HEADER = "x-gateway-destination-endpoint"


PORT = 8123
"""Of the pods."""


class Picker(NamedTuple):
    stub: ExternalProcessorStub
    health: HealthStub
    metrics: str
    """URL of its metrics."""


@contextlib.contextmanager
def picking(targets: list[str], scratch: Path, *arguments: object) -> Iterator[Picker]:
    """A picker of its own process, in plain text."""
    line = ["--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]
    line += ["--endpoint-port", str(PORT), *arguments]
    with (
        running_gateway(targets, *line, scratch=scratch, program="endpoint-picker") as running,
        grpc.insecure_channel(running.grpc) as channel,
    ):
        stub = ExternalProcessorStub(channel)
        yield Picker(stub, HealthStub(channel), f"{running.url}/metrics")


@dataclass
class Exchange:
    """One HTTP request at the proxy. `mode`: how bodies are sent; None: without saying."""

    stub: ExternalProcessorStub
    mode: str | None = "FULL_DUPLEX_STREAMED"
    subset: list[str] | None = None
    _requests: queue.Queue = field(default_factory=queue.Queue)
    _began: bool = False

    def __post_init__(self) -> None:
        self.call = self.stub.Process(iter(self._requests.get, None), timeout=30)

    def send(self, **part: Any) -> None:
        request = pb.ProcessingRequest(**part)
        if not self._began and self.mode is not None:
            value = pb.BodySendMode.Value(self.mode)
            config = pb.ProtocolConfiguration(request_body_mode=value, response_body_mode=value)
            request.protocol_config.CopyFrom(config)
        if not self._began and self.subset is not None:
            hint = request.metadata_context.filter_metadata["envoy.lb.subset_hint"]
            hint.update({f"{HEADER}-subset": self.subset})
        self._began = True
        self._requests.put(request)

    def headers(self, *, end_of_stream: bool = False) -> None:
        names = {":method": "POST", ":path": "/v1/completions", HEADER: "10.9.9.9:1"}
        values = [
            pb.HeaderValue(key=name, raw_value=value.encode()) for name, value in names.items()
        ]
        found = pb.HttpHeaders(headers=pb.HeaderMap(headers=values), end_of_stream=end_of_stream)
        self.send(request_headers=found)

    def body(self, *chunks: bytes, end_of_stream: bool = True) -> None:
        for number, chunk in enumerate(chunks, 1):
            last = end_of_stream and number == len(chunks)
            self.send(request_body=pb.HttpBody(body=chunk, end_of_stream=last))

    def next(self) -> pb.ProcessingResponse:
        return next(self.call)

    def end(self) -> None:
        self._requests.put(None)


@contextlib.contextmanager
def exchange(stub: ExternalProcessorStub, **options: Any) -> Iterator[Exchange]:
    """At its end the proxy has ended the stream, and nothing more has come."""
    found = Exchange(stub, **options)
    try:
        yield found
    finally:
        found.end()
    assert list(found.call) == []


def destination(answer: pb.ProcessingResponse) -> str:
    """The chosen address. The header and the metadata must agree."""
    kind = answer.WhichOneof("response")
    assert kind in ("request_headers", "request_body"), answer
    (option,) = getattr(answer, kind).response.header_mutation.set_headers
    assert option.header.key == HEADER
    assert option.append_action == pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    address = option.header.raw_value.decode()
    metadata = {space: dict(answer.dynamic_metadata[space]) for space in answer.dynamic_metadata}
    assert metadata == {"envoy.lb": {HEADER: address}}
    return address


def completion(prompt: Any, model: str = "fake-model") -> bytes:
    return json.dumps({"model": model, "prompt": prompt}).encode()


def pick(stub: ExternalProcessorStub, body: bytes, **options: Any) -> str:
    """The address for a request, whose body must come back as it was."""
    with exchange(stub, **options) as it:
        it.headers()
        it.body(body[:10], body[10:])
        address = destination(it.next())
        chunks = [it.next().request_body.response.body_mutation for _ in range(2)]
        assert b"".join(chunk.streamed_response.body for chunk in chunks) == body
        assert [chunk.streamed_response.end_of_stream for chunk in chunks] == [False, True]
    return address
