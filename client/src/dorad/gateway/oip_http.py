"""The Open Inference Protocol over HTTP: the routes below /v2, with Triton's generate extension."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dorad.gateway import oip, schema
from dorad.gateway.callers import Caller
from dorad.gateway.core import Gateway
from dorad.gateway.errors import Refusal
from dorad.gateway.http import (
    Endpoint,
    EventStream,
    answer,
    read_body,
    read_json,
    while_connected,
)
from dorad.gateway.writing import to_json

_HEADER_LENGTH = "inference-header-content-length"

_TENSOR = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"type": "string"},
        "datatype": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer"}, "maxItems": 8},
        "data": {"type": "array"},
        "parameters": {
            "type": "object",
            "properties": {"binary_data_size": schema.UINT32},
        },
    },
}
INFER: dict[str, Any] = {
    "type": "object",
    "required": ["inputs"],
    "additionalProperties": False,
    "properties": {
        "id": {"type": "string", "maxLength": 256},
        "parameters": {"type": "object"},
        "inputs": {"type": "array", "items": _TENSOR, "minItems": 1, "maxItems": 8},
        "outputs": {
            "type": "array",
            "maxItems": 8,
            "items": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {"type": "string"},
                    "parameters": {
                        "type": "object",
                        "properties": {"binary_data": {"type": "boolean"}},
                    },
                },
            },
        },
    },
}
GENERATE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "maxLength": 256},
        "text_input": {"type": "string"},
        "input_ids": schema.TOKEN_IDS,
        "parameters": {"type": "object"},
    },
}

INDEX: dict[str, Any] = {"type": "object", "properties": {"ready": {"type": "boolean"}}}


def error_body(refusal: Refusal) -> dict[str, Any]:
    """The protocol's own form has text only; the reason stands before it."""
    return {"error": f"{refusal.reason}: {refusal.message}"}


def _named(request: Request) -> tuple[str, str]:
    return request.path_params["model"], request.path_params.get("version", "")


# --- infer ----------------------------------------------------------------------------------------


async def _infer(gateway: Gateway, request: Request, caller: Caller) -> Response:
    body, binary = await _parts(gateway, request)
    checked = schema.checked(schema.parse(body), INFER)
    inputs, at = [], 0
    for item in checked["inputs"]:
        size = (item.get("parameters") or {}).get("binary_data_size")
        data: Any
        if size is not None:
            data, at = binary[at : at + size], at + size
        elif "data" in item:
            data = _flat(item["data"])
        else:
            message = f"input {item['name']!r} has no data"
            raise Refusal(400, "TENSOR_INVALID", message, param=item["name"])
        inputs.append(oip.tensor(item["name"], item["datatype"], item["shape"], data))
    if at != len(binary):
        message = f"the binary part has {len(binary)} bytes, the inputs name {at}"
        raise Refusal(400, "TENSOR_INVALID", message, param="inputs")
    outputs, parameters = checked.get("outputs", []), checked.get("parameters", {})
    all_binary = parameters.get("binary_data_output") is True
    as_binary = {
        row["name"]: (row.get("parameters") or {}).get("binary_data", all_binary) for row in outputs
    }
    model, version = _named(request)

    async def work() -> oip.Answer:
        inference = await oip.understand(
            gateway,
            caller,
            model=model,
            version=version,
            request_id=checked.get("id", ""),
            inputs=inputs,
            outputs=list(as_binary),
            parameters=parameters,
            stream=False,
        )
        return await oip.infer(gateway, caller, inference)

    found = await while_connected(request.receive, work())
    return _response(found, as_binary, all_binary)


async def _parts(gateway: Gateway, request: Request) -> tuple[bytes, bytes]:
    """The JSON and the binary part of a body. The header of the second is no browser's to send."""
    length = request.headers.get(_HEADER_LENGTH)
    if length is None:
        return await read_json(request, gateway.limits), b""
    body = await read_body(request, gateway.limits)
    if not length.isdecimal() or int(length) > len(body):
        message = f"{_HEADER_LENGTH} is {length!r}, the body has {len(body)} bytes"
        raise Refusal(400, "TENSOR_INVALID", message)
    return body[: int(length)], body[int(length) :]


def _flat(data: list[Any]) -> list[Any]:
    """Rows may be nested as the shape says, or flat."""
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
    """Fields beside the inputs are parameters, as if they stood in `parameters`."""
    body = schema.parse(await read_json(request, gateway.limits))
    given = schema.checked(body, GENERATE)
    inputs = []
    if "input_ids" in given:
        ids = given.pop("input_ids")
        inputs.append(oip.tensor("input_ids", "INT64", [len(ids)], ids))
    if "text_input" in given:
        inputs.append(oip.tensor("text_input", "BYTES", [1], [given.pop("text_input")]))
    parameters = given.pop("parameters", {})
    request_id = given.pop("id", "")
    model, version = _named(request)
    return await oip.understand(
        gateway,
        caller,
        model=model,
        version=version,
        request_id=request_id,
        inputs=inputs,
        outputs=(),
        parameters={**parameters, **given},
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
    inference = await _understood(gateway, request, caller, stream=False)
    found = await while_connected(request.receive, oip.infer(gateway, caller, inference))
    return answer(_shown(found))


async def _generate_stream(gateway: Gateway, request: Request, caller: Caller) -> Response:
    inference = await _understood(gateway, request, caller, stream=True)

    async def events() -> AsyncGenerator[dict[str, Any]]:
        async with contextlib.aclosing(oip.infer_stream(gateway, caller, inference)) as news:
            async for found, _ in news:
                yield _shown(found)

    first = gateway.metrics.first_token("oip_generate_stream")
    stream = EventStream(events(), error_body, on_first=first)
    return await while_connected(request.receive, stream.begin())


# --- Health and metadata --------------------------------------------------------------------------


async def _live(gateway: Gateway, request: Request, caller: Caller) -> Response:
    return answer({"live": True})


async def _ready(gateway: Gateway, request: Request, caller: Caller) -> Response:
    up = await gateway.healthy()
    return answer({"ready": up}, 200 if up else 503)


async def _model_ready(gateway: Gateway, request: Request, caller: Caller) -> Response:
    model, version = _named(request)
    up = await oip.ready(gateway, caller, model, version)
    return answer({"name": model, "ready": up}, 200 if up else 404)


async def _model(gateway: Gateway, request: Request, caller: Caller) -> Response:
    model, version = _named(request)
    return answer(await oip.metadata(gateway, caller, model, version))


async def _server(gateway: Gateway, request: Request, caller: Caller) -> Response:
    return answer(oip.server_metadata())


async def _index(gateway: Gateway, request: Request, caller: Caller) -> Response:
    body = schema.parse(await read_json(request, gateway.limits) or b"{}")
    given = schema.checked(body, INDEX)
    return answer(await oip.index(gateway, caller, ready_only=given.get("ready", False)))


def routes(gateway: Gateway) -> list[Route]:
    def door(name: str, handler: Any, *, public: bool = False) -> Endpoint:
        return Endpoint(gateway, name, handler, error_body, public=public)

    live = door("oip_live", _live, public=True)
    ready = door("oip_ready", _ready, public=True)
    found = [
        Route("/v2", door("oip_server", _server, public=True), methods=["GET"]),
        Route("/v2/health/live", live, methods=["GET"]),
        Route("/v2/health/ready", ready, methods=["GET"]),
        Route("/v2/repository/index", door("oip_index", _index), methods=["POST"]),
    ]
    of_models = (
        ("", "GET", door("oip_model", _model)),
        ("/ready", "GET", door("oip_model_ready", _model_ready)),
        ("/infer", "POST", door("oip_infer", _infer)),
        ("/generate", "POST", door("oip_generate", _generate)),
        ("/generate_stream", "POST", door("oip_generate_stream", _generate_stream)),
    )
    for start in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        found += [Route(start + end, door, methods=[method]) for end, method, door in of_models]
    return found
