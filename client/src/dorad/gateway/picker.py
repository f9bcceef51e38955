"""Chooses the pod of each HTTP request for a gateway of Kubernetes.

The endpoint picker protocol of the Gateway API Inference Extension, 1.0: a proxy asks over Envoy's
external processing (ext_proc) and gets the address of one pod of its InferencePool.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from typing import Any

from google.protobuf import struct_pb2

from dorad import _routing
from dorad import types as t
from dorad._aio.client import Client
from dorad._pool_server import Server
from dorad._references import ref_parts
from dorad.fleet.manifest_store import ManifestStore
from dorad.fleet.watched import WatchedServers, address_of
from dorad.gateway import external_processing_pb2 as pb
from dorad.gateway.external_processing_pb2_grpc import ExternalProcessorServicer
from dorad.gateway.metrics import PickerMetrics

DESTINATION = "x-gateway-destination-endpoint"
"""Header, and key of the metadata, with the chosen pod as ip:port."""
DESTINATION_NAMESPACE = "envoy.lb"
SUBSET = "x-gateway-destination-endpoint-subset"
"""Key of the metadata with the pods to choose from."""
SUBSET_NAMESPACE = "envoy.lb.subset_hint"

_DEFERRED = (pb.FULL_DUPLEX_STREAMED, pb.BUFFERED, pb.BUFFERED_PARTIAL)
"""Modes in which the choice can wait for the body."""


class Refused(Exception):
    """The request gets this status and text at once."""

    def __init__(self, status: int, outcome: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.outcome = outcome
        """In the metrics."""


class Endpoints(WatchedServers):
    """The servers and their pods. Use it from one event loop.

    Args:
      port: of the pods' HTTP listeners.
    """

    _usable = ("ready",)

    def __init__(
        self,
        targets: Iterable[str],
        connect: Callable[[str], Client],
        store: ManifestStore | None,
        port: int,
    ) -> None:
        super().__init__(targets, connect, store)
        self._port = port
        self._addresses: dict[str, str] = {}  # By target.

    async def look(self) -> None:
        """Asks for states, and for addresses, which change with each start of a pod."""
        targets = self.targets
        found = asyncio.gather(*(address_of(target, self._port) for target in targets))
        _, addresses = await asyncio.gather(super().look(), found)
        self._addresses = dict(zip(targets, addresses, strict=True))

    def pick(
        self, model: str, begin: str, subset: Collection[str] | None
    ) -> tuple[Server, str, str]:
        """The server for a request, its pod's address, and why it is this one. Raises Refused.

        The reason is "home", or why the home is passed over: "version", which it lacks, "full" or
        "bound". "least": the request has no home, and goes where the load is least.

        Args:
          model: the request's. "": any server will do.
          begin: of its prompt.
          subset: addresses to choose from. None: any.
        """
        able = [
            server
            for server in self._able(set())
            if (address := self._addresses.get(server.target))
            and (subset is None or address in subset)
        ]
        if not able:
            raise Refused(503, "no_server", "no server is ready")
        home = _routing.text_key(model, begin) if model else b""
        server = self._choose(able, model, home)
        reason = self._reason(server, able, model, home)
        return server, self._addresses[server.target], reason

    def _choose(self, able: list[Server], adapter: str, home: bytes) -> Server:
        return super()._choose(self._having(able, adapter), adapter, home)

    def _having(self, able: list[Server], model: str) -> list[Server]:
        """Those that have a model's version: the named one, or the fleet's, or any, active.

        All of them if none has it, as for the base model: the pod says what is wrong.
        """
        name, number, digest = ref_parts(model)
        release = self._manifest.committed().get(name)

        def is_it(version: t.AdapterVersion) -> bool:
            if number:
                named = str(version.version) == number and version.digest.startswith(digest)
                return named and version.state == "ready"
            fleets = release is None or version.version == release.version
            return version.active and fleets

        return [server for server in able if any(map(is_it, server.versions.get(name, ())))] or able

    def _reason(self, chosen: Server, able: list[Server], model: str, home: bytes) -> str:
        if not home:
            return "least"
        first = self._home_of(able, home)
        if chosen is first:
            return "home"
        if first not in self._having(able, model):
            return "version"
        return "full" if first.full else "bound"


class EndpointPicker(ExternalProcessorServicer):
    """The service on grpc.aio.

    Args:
      body_bytes: longer bodies of requests are refused (413).
    """

    def __init__(self, endpoints: Endpoints, body_bytes: int) -> None:
        self.metrics = PickerMetrics(endpoints)
        self._endpoints = endpoints
        self._body_bytes = body_bytes

    async def Process(
        self, requests: AsyncIterator[pb.ProcessingRequest], context: Any
    ) -> AsyncIterator[pb.ProcessingResponse]:
        with contextlib.ExitStack() as outstanding:
            exchange = _Exchange(self._endpoints, self._body_bytes, outstanding, self.metrics)
            outcome = "ended"
            try:
                async for request in requests:
                    answers = exchange.answers(request)
                    for answer in answers:
                        if not request.observability_mode:
                            yield answer
            except Refused as refused:
                outcome = refused.outcome
                yield _immediate(refused)
            finally:
                if not exchange.chosen:
                    self.metrics.requests.labels(outcome).inc()


class _Exchange:
    """One HTTP request, and its response: they pass unchanged, but for the destination.

    It counts as outstanding on its server until the proxy ends the stream.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        body_bytes: int,
        outstanding: contextlib.ExitStack,
        metrics: PickerMetrics,
    ) -> None:
        self._endpoints = endpoints
        self._body_bytes = body_bytes
        self._outstanding = outstanding
        self._metrics = metrics
        # What the protocol demands, of proxies that do not name their modes.
        self._modes = pb.ProtocolConfiguration(
            request_body_mode=pb.FULL_DUPLEX_STREAMED, response_body_mode=pb.FULL_DUPLEX_STREAMED
        )
        self._subset: list[str] | None = None
        self._chunks: list[bytes] = []
        self._size = 0
        self.chosen = False

    def answers(self, request: pb.ProcessingRequest) -> Sequence[pb.ProcessingResponse]:
        """The answers to one message. Raises Refused."""
        if request.HasField("protocol_config"):
            self._modes = request.protocol_config
        kind = request.WhichOneof("request")
        if kind == "request_headers":
            return self._on_headers(request)
        if kind == "request_body":
            return self._on_body(request.request_body)
        if kind == "request_trailers":
            trailers = pb.ProcessingResponse(request_trailers=pb.TrailersResponse())
            return [*([] if self.chosen else self._release(last=False)), trailers]
        if kind == "response_headers":
            return [pb.ProcessingResponse(response_headers=pb.HeadersResponse())]
        if kind == "response_body":
            body = request.response_body
            return [
                pb.ProcessingResponse(
                    response_body=pb.BodyResponse(
                        response=_unchanged(body.body, body.end_of_stream)
                        if self._modes.response_body_mode == pb.FULL_DUPLEX_STREAMED
                        else None
                    )
                )
            ]
        if kind == "response_trailers":
            return [pb.ProcessingResponse(response_trailers=pb.TrailersResponse())]
        return []

    def _on_headers(self, request: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        hints = request.metadata_context.filter_metadata
        if SUBSET_NAMESPACE in hints and SUBSET in hints[SUBSET_NAMESPACE].fields:
            self._subset = _texts(hints[SUBSET_NAMESPACE].fields[SUBSET])
        mode = self._modes.request_body_mode
        if request.request_headers.end_of_stream or mode not in _DEFERRED:
            return [self._choose("request_headers")]
        if mode == pb.FULL_DUPLEX_STREAMED:
            return []  # With the last chunk of the body.
        return [pb.ProcessingResponse(request_headers=pb.HeadersResponse())]

    def _on_body(self, body: pb.HttpBody) -> list[pb.ProcessingResponse]:
        mode = self._modes.request_body_mode
        if self.chosen and mode != pb.FULL_DUPLEX_STREAMED:
            return [pb.ProcessingResponse(request_body=pb.BodyResponse())]
        self._size += len(body.body)
        if self._size > self._body_bytes:
            raise Refused(413, "body_too_long", f"the body is longer than {self._body_bytes} bytes")
        self._chunks.append(body.body)
        if mode != pb.FULL_DUPLEX_STREAMED:
            return [self._choose("request_body")]
        return self._release(last=True) if body.end_of_stream else []

    def _release(self, *, last: bool) -> list[pb.ProcessingResponse]:
        """The destination, and then the body. `last`: no trailers follow."""
        if self._modes.request_body_mode != pb.FULL_DUPLEX_STREAMED:
            return []
        ends = [last and number == len(self._chunks) for number in range(1, len(self._chunks) + 1)]
        return [
            self._choose("request_headers"),
            *(
                pb.ProcessingResponse(request_body=pb.BodyResponse(response=_unchanged(chunk, end)))
                for chunk, end in zip(self._chunks, ends, strict=True)
            ),
        ]

    def _choose(self, kind: str) -> pb.ProcessingResponse:
        """The answer with the destination, to request_headers or request_body."""
        model, begin = _prompt(b"".join(self._chunks))
        server, address, reason = self._endpoints.pick(model, begin, self._subset)
        self._outstanding.enter_context(server.working())
        self.chosen = True
        self._metrics.requests.labels("chosen").inc()
        self._metrics.picks.labels(reason).inc()
        # A header of that name that the caller sent must not choose.
        option = pb.HeaderValueOption(
            header=pb.HeaderValue(key=DESTINATION, raw_value=address.encode()),
            append_action=pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
        )
        common = pb.CommonResponse(
            header_mutation=pb.HeaderMutation(set_headers=[option]), clear_route_cache=True
        )
        metadata = struct_pb2.Struct()
        metadata.update({DESTINATION_NAMESPACE: {DESTINATION: address}})
        if kind == "request_headers":
            return pb.ProcessingResponse(
                request_headers=pb.HeadersResponse(response=common), dynamic_metadata=metadata
            )
        return pb.ProcessingResponse(
            request_body=pb.BodyResponse(response=common), dynamic_metadata=metadata
        )


def _prompt(body: bytes) -> tuple[str, str]:
    """The model of a request and the beginning of its prompt; ("", ""): the pod says what is wrong
    with it."""
    try:
        request = json.loads(body)
        model = request["model"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "", ""
    if not isinstance(model, str):
        return "", ""
    prompt = request.get("messages") or request.get("prompt") or request.get("input") or ""
    return model, prompt if isinstance(prompt, str) else json.dumps(prompt)


def _texts(value: struct_pb2.Value) -> list[str]:
    """A list of addresses, also as one text with commas."""
    listed = [entry.string_value for entry in value.list_value.values] or [value.string_value]
    return [text.strip() for entry in listed for text in entry.split(",") if text.strip()]


def _unchanged(body: bytes, end_of_stream: bool) -> pb.CommonResponse:
    streamed = pb.StreamedBodyResponse(body=body, end_of_stream=end_of_stream)
    return pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=streamed))


def _immediate(refused: Refused) -> pb.ProcessingResponse:
    return pb.ProcessingResponse(
        immediate_response=pb.ImmediateResponse(
            status=pb.HttpStatus(code=refused.status), body=str(refused).encode()
        )
    )
