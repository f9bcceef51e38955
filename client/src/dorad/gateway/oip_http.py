"""The Open Inference Protocol over HTTP: the routes below /v2, with Triton's generate extension."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dorad.gateway import oip, responses, validation
from dorad.gateway.callers import Caller
from dorad.gateway.core import Gateway
from dorad.gateway.errors import Refusal
from dorad.gateway.http import (
    Endpoint,
    EventStream,
    Handler,
    answer,
    read_body,
    read_json,
    while_connected,
)
from dorad.gateway.validation import Body, TokenIds, UInt32
from dorad.gateway.writing import to_json

_HEADER_LENGTH = "inference-header-content-length"


class TensorParameters(Body):
    model_config = ConfigDict(extra="ignore")

    binary_data_size: UInt32 | None = None
    """Bytes of the tensor behind the JSON."""


class InputTensor(Body):
    model_config = ConfigDict(extra="ignore")

    name: str
    datatype: str
    shape: list[int] = Field(max_length=8, fail_fast=True)
    data: list[Any] | None = None
    """Flat, or nested as the shape says."""
    parameters: TensorParameters = TensorParameters()


class OutputParameters(Body):
    model_config = ConfigDict(extra="ignore")

    binary_data: bool | None = None


class RequestedOutput(Body):
    model_config = ConfigDict(extra="ignore")

    name: str
    parameters: OutputParameters = OutputParameters()


class InferRequest(Body):
    id: str = Field(default="", max_length=256)
    parameters: dict[str, Any] = Field(default={})
    inputs: list[InputTensor] = Field(min_length=1, max_length=8, fail_fast=True)
    outputs: list[RequestedOutput] = Field(default=[], max_length=8, fail_fast=True)


class GenerateRequest(Body):
    """Other fields are parameters, like those in `parameters`."""

    model_config = ConfigDict(extra="allow")

    id: str = Field(default="", max_length=256)
    text_input: str | None = None
    input_ids: TokenIds | None = None
    parameters: dict[str, Any] = Field(default={})


class IndexRequest(Body):
    model_config = ConfigDict(extra="ignore")

    ready: bool = False
    """Only models that are ready."""


def error_body(refusal: Refusal) -> dict[str, Any]:
    """The protocol's error is a text. It begins with the reason."""
    return {"error": f"{refusal.reason}: {refusal.message}"}


def _named(request: Request) -> tuple[str, str]:
    return request.path_params["model"], request.path_params.get("version", "")


# --- infer ----------------------------------------------------------------------------------------


async def _infer(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """Tokens for a prompt given as tensors."""
    body, binary = await _parts(gateway, request)
    checked = validation.checked(validation.parse(body), InferRequest)
    inputs, at = [], 0
    for item in checked.inputs:
        size = item.parameters.binary_data_size
        data: Any
        if size is not None:
            data, at = binary[at : at + size], at + size
        elif item.data is not None:
            data = _flat(item.data)
        else:
            message = f"input {item.name!r} has no data"
            raise Refusal(400, "TENSOR_INVALID", message, param=item.name)
        inputs.append(oip.tensor(item.name, item.datatype, item.shape, data))
    if at != len(binary):
        message = f"the binary part has {len(binary)} bytes, but the inputs declare {at}"
        raise Refusal(400, "TENSOR_INVALID", message, param="inputs")
    all_binary = checked.parameters.get("binary_data_output") is True
    as_binary = {
        row.name: all_binary if row.parameters.binary_data is None else row.parameters.binary_data
        for row in checked.outputs
    }
    model, version = _named(request)

    async def work() -> oip.Answer:
        inference = await oip.understand(
            gateway,
            caller,
            model=model,
            version=version,
            request_id=checked.id,
            inputs=inputs,
            outputs=list(as_binary),
            parameters=checked.parameters,
            stream=False,
        )
        return await oip.infer(gateway, caller, inference)

    found = await while_connected(request.receive, work())
    return _response(found, as_binary, all_binary)


async def _parts(gateway: Gateway, request: Request) -> tuple[bytes, bytes]:
    """The JSON and the binary part of a body. Browsers cannot send the header of the second."""
    length = request.headers.get(_HEADER_LENGTH)
    if length is None:
        return await read_json(request, gateway.limits), b""
    body = await read_body(request, gateway.limits)
    if not length.isdecimal() or int(length) > len(body):
        message = f"{_HEADER_LENGTH} is {length!r}, but the body has {len(body)} bytes"
        raise Refusal(400, "TENSOR_INVALID", message)
    return body[: int(length)], body[int(length) :]


def _flat(data: list[Any]) -> list[Any]:
    """Flattens rows that are nested as in the shape."""
    while data and all(isinstance(row, list) for row in data):
        data = [item for row in data for item in row]
    return data


def _response(found: oip.Answer, as_binary: Mapping[str, bool], all_binary: bool) -> Response:
    rows, binary = [], []
    for tensor in found.outputs:
        row: dict[str, Any] = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": tensor.shape,
        }
        if as_binary.get(tensor.name, all_binary):
            binary.append(tensor.raw())
            row["parameters"] = {"binary_data_size": len(binary[-1])}
        elif isinstance(tensor.data, list):
            row["data"] = [item.decode() for item in tensor.data]
        else:
            row["data"] = tensor.data.tolist()
        rows.append(row)
    head = to_json({**_head(found), "parameters": found.parameters, "outputs": rows})
    if not binary:
        return Response(head, media_type="application/json")
    return Response(
        head + b"".join(binary),
        media_type="application/octet-stream",
        headers={_HEADER_LENGTH: str(len(head))},
    )


def _head(found: oip.Answer) -> dict[str, Any]:
    head = {"model_name": found.model, "model_version": found.version}
    return head | ({"id": found.id} if found.id else {})


# --- generate -------------------------------------------------------------------------------------


async def _understood(gateway: Gateway, request: Request, caller: Caller, *, stream: bool) -> Any:
    body = validation.parse(await read_json(request, gateway.limits))
    given = validation.checked(body, GenerateRequest)
    inputs = []
    if given.input_ids is not None:
        ids = given.input_ids
        inputs.append(oip.tensor("input_ids", "INT64", [len(ids)], ids))
    if given.text_input is not None:
        inputs.append(oip.tensor("text_input", "BYTES", [1], [given.text_input]))
    model, version = _named(request)
    return await oip.understand(
        gateway,
        caller,
        model=model,
        version=version,
        request_id=given.id,
        inputs=inputs,
        outputs=(),
        parameters={**given.parameters, **(given.model_extra or {})},
        stream=stream,
    )


def _shown(found: oip.Answer) -> dict[str, Any]:
    values = {
        tensor.name: tensor.data[0].decode()
        if isinstance(tensor.data, list)
        else tensor.data.tolist()
        for tensor in found.outputs
    }
    return {**_head(found), **values, "parameters": found.parameters}


async def _generate(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """Tokens for a prompt."""
    inference = await _understood(gateway, request, caller, stream=False)
    found = await while_connected(request.receive, oip.infer(gateway, caller, inference))
    return answer(_shown(found))


async def _generate_stream(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """Tokens for a prompt, as server-sent events."""
    inference = await _understood(gateway, request, caller, stream=True)

    async def events() -> AsyncGenerator[dict[str, Any]]:
        async with contextlib.aclosing(oip.infer_stream(gateway, caller, inference)) as incoming:
            async for found, _ in incoming:
                yield _shown(found)

    first = gateway.metrics.first_token("oip_generate_stream")
    stream = EventStream(events(), caller, error_body, on_first=first)
    return await while_connected(request.receive, stream.begin())


# --- Health and metadata --------------------------------------------------------------------------


async def _live(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """Whether the gateway runs."""
    return answer({"live": True})


async def _ready(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """Whether the server takes requests."""
    up = await gateway.healthy()
    return answer({"ready": up}, 200 if up else 503)


async def _model_ready(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """Whether requests for a model are taken."""
    model, version = _named(request)
    up = await oip.ready(gateway, caller, model, version)
    return answer({"name": model, "ready": up}, 200 if up else 404)


async def _model(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """A model's tensors and versions."""
    model, version = _named(request)
    return answer(await oip.metadata(gateway, caller, model, version))


async def _model_config(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """A model's configuration, as Triton has it."""
    model, version = _named(request)
    return answer(await oip.configuration(gateway, caller, model, version))


async def _stats(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """Counts and times of requests by model and version, as Triton has them."""
    model, version = request.path_params.get("model", ""), request.path_params.get("version", "")
    return answer({"model_stats": await oip.statistics(gateway, caller, model, version)})


async def _server(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """The server's name, version and extensions."""
    return answer(oip.server_metadata())


async def _index(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """All models and versions."""
    body = validation.parse(await read_json(request, gateway.limits) or b"{}")
    given = validation.checked(body, IndexRequest)
    return answer(await oip.index(gateway, caller, ready_only=given.ready))


def routes(gateway: Gateway) -> list[Route]:
    def endpoint(name: str, handler: Handler, **options: Any) -> Endpoint:
        return Endpoint(gateway, name, handler, error_body, **options)

    live = endpoint("oip_live", _live, answers=responses.Live, public=True)
    ready = endpoint("oip_ready", _ready, answers=responses.Ready, public=True)
    index = endpoint("oip_index", _index, body=IndexRequest, answers=responses.Index)
    stats = endpoint("oip_model_stats", _stats)
    server = endpoint("oip_server", _server, answers=responses.ServerMetadata, public=True)
    found = [
        Route("/v2", server, methods=["GET"]),
        Route("/v2/health/live", live, methods=["GET"]),
        Route("/v2/health/ready", ready, methods=["GET"]),
        Route("/v2/repository/index", index, methods=["POST"]),
        Route("/v2/models/stats", stats, methods=["GET"]),
    ]
    infer = endpoint("oip_infer", _infer, body=InferRequest, answers=responses.InferResponse)
    of_generate = {"body": GenerateRequest, "answers": responses.GenerateResponse}
    generate = endpoint("oip_generate", _generate, **of_generate)
    stream = endpoint(
        "oip_generate_stream",
        _generate_stream,
        body=GenerateRequest,
        events=responses.GenerateResponse,
    )
    metadata = endpoint("oip_model", _model, answers=responses.ModelMetadata)
    model_ready = endpoint("oip_model_ready", _model_ready, answers=responses.ModelReady)
    of_models = (
        ("", "GET", metadata),
        ("/ready", "GET", model_ready),
        ("/config", "GET", endpoint("oip_model_config", _model_config)),
        ("/stats", "GET", stats),
        ("/infer", "POST", infer),
        ("/generate", "POST", generate),
        ("/generate_stream", "POST", stream),
    )
    for start in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        found += [Route(start + end, app, methods=[method]) for end, method, app in of_models]
    return found
