"""Loading adapters from folders, and unloading them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dorad import types as t
from dorad.gateway import validation
from dorad.gateway.callers import Caller
from dorad.gateway.core import Gateway
from dorad.gateway.errors import Refusal
from dorad.gateway.http import Endpoint, answer, read_json, while_connected
from dorad.gateway.responses import Answer
from dorad.gateway.rl.folder import opened
from dorad.gateway.validation import Body

# An "@" separates a name from a version.
_Name = Annotated[str, Field(pattern=r"^[^@\x00-\x1f]{1,128}$")]


class LoadRequest(Body):
    lora_name: _Name
    """The model of later requests."""
    lora_path: str = Field(min_length=1)
    """A PEFT folder below one of the gateway's --adapter-root."""
    load_inplace: bool = True
    """Without effect: a name that is loaded gets a new version."""
    base_model_name: str | None = None
    """Without effect: the server checks that the adapter fits."""
    is_3d_lora_weight: Literal[False] = False
    in_flight_policy: t.InFlightPolicy | None = None
    """Of later requests for the name. Default: the gateway's --in-flight-policy."""


class UnloadRequest(Body):
    lora_name: _Name
    lora_int_id: int | None = None
    """Without effect: names are unique."""


class LoadResponse(Answer):
    status: str
    lora_name: str
    version: int
    digest: str


class UnloadResponse(Answer):
    status: str
    lora_name: str


async def _load(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """Publishes an adapter from a folder and makes it active."""
    raw = validation.parse(await read_json(request, gateway.limits))
    given = validation.checked(raw, LoadRequest)
    caller.record.model = given.lora_name
    rl = gateway.servers.rl
    assert rl is not None
    if given.lora_name == (await gateway.model()).name:
        message = f"{given.lora_name!r} is the base model"
        raise Refusal(400, "FIELD_INVALID", message, param="lora_name")
    with contextlib.ExitStack() as files:
        folder = await asyncio.to_thread(
            files.enter_context, opened(given.lora_path, rl.adapter_roots)
        )
        version = await while_connected(
            request.receive,
            gateway.client_of(caller).load(
                given.lora_name,
                timeout=gateway.limits.timeout,
                policy=given.in_flight_policy,
                path=folder,
            ),
        )
    return answer(
        {
            "status": "ok",
            "lora_name": given.lora_name,
            "version": version.version,
            "digest": version.digest,
        }
    )


async def _unload(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """Retires an adapter. Requests in flight keep it until they end."""
    raw = validation.parse(await read_json(request, gateway.limits))
    given = validation.checked(raw, UnloadRequest)
    caller.record.model = given.lora_name
    limit = gateway.limits.timeout
    await gateway.client_of(caller).unload(given.lora_name, timeout=limit)
    return answer({"status": "ok", "lora_name": given.lora_name})


def routes(gateway: Gateway) -> list[Route]:
    load = Endpoint(
        gateway, "load_lora_adapter", _load, Refusal.body, body=LoadRequest, answers=LoadResponse
    )
    unload = Endpoint(
        gateway,
        "unload_lora_adapter",
        _unload,
        Refusal.body,
        body=UnloadRequest,
        answers=UnloadResponse,
    )
    return [
        # vLLM's, prime-rl's and SkyRL's.
        *(
            Route(f"{root}/load_lora_adapter", load, methods=["POST"])
            for root in ("/v1", "", "/skyrl/v1")
        ),
        *(Route(f"{root}/unload_lora_adapter", unload, methods=["POST"]) for root in ("/v1", "")),
    ]
