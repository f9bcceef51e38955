"""Pausing, sleeping, and what vLLM's servers tell about themselves."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import dorad
from dorad.gateway.callers import Caller
from dorad.gateway.core import Gateway
from dorad.gateway.errors import Refusal
from dorad.gateway.http import Endpoint, Handler, answer, while_connected
from dorad.gateway.rl import fields
from dorad.gateway.rl.fields import Flag
from dorad.gateway.validation import Body

_TORCH_DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16"}
# vLLM keeps adapters in the memory of the weights.
_Tag = Literal["weights", "kv_cache"]
_TAGS: dict[_Tag, tuple[Literal["weights", "kv", "adapters"], ...]] = {
    "weights": ("weights", "adapters"),
    "kv_cache": ("kv",),
}
_NO_LIMIT = 2**31 - 1


class NoFields(Body):
    pass


class PauseRequest(Body):
    mode: Literal["abort", "keep", "wait"] = "abort"
    """End the requests in flight, freeze them until /resume, or let them finish first."""
    wait_for_inflight_requests: Flag = False
    """The older name of mode "wait"."""
    clear_cache: Flag = True
    """Without effect: a cached prefix is of one version, so none is stale."""


class SleepRequest(Body):
    level: Literal["1", "2", 1, 2] = 1
    """Without effect: the server reads the weights again from the model's folder."""
    tags: list[_Tag] = Field(default=[])
    """The memory to free. Default: all."""
    mode: Literal["keep"] = "keep"
    """Requests in flight go on after /wake_up."""


class WakeRequest(Body):
    tags: list[_Tag] = Field(default=[])
    """Default: all."""


class ResetRequest(Body):
    reset_running_requests: Flag = False
    reset_external: Flag = False


class SessionRequest(Body):
    session_id: str = ""


# --- Pausing --------------------------------------------------------------------------------------


async def _paused(
    gateway: Gateway, request: Request, caller: Caller, mode: Literal["abort", "keep", "wait"]
) -> int:
    """Returns the number of requests that were ended, frozen or finished."""
    limit = gateway.limits.timeout
    calls = gateway.client_of(caller)
    pausing = calls.every(lambda client: client.pause(mode, timeout=limit))
    return sum(await while_connected(request.receive, pausing))


async def _pause(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """Stops generation. Adapters can be loaded meanwhile; new requests wait."""
    given = await fields.read(gateway, request, PauseRequest)
    mode = "wait" if given.wait_for_inflight_requests else given.mode
    count = await _paused(gateway, request, caller, mode)
    return answer({"status": "paused", "requests": count})


async def _resumed(gateway: Gateway, caller: Caller) -> None:
    await gateway.client_of(caller).every(lambda c: c.resume(timeout=gateway.limits.timeout))


async def _resume(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """Ends the pause."""
    await fields.read(gateway, request, NoFields)
    await _resumed(gateway, caller)
    return answer({"status": "resumed"})


async def _areal_pause(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """AReaL's pause: ends the requests in flight."""
    await fields.read(gateway, request, NoFields)
    count = await _paused(gateway, request, caller, "abort")
    return answer({"success": True, "message": f"paused, {count} requests aborted"})


async def _areal_continue(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """Ends AReaL's pause."""
    await fields.read(gateway, request, NoFields)
    await _resumed(gateway, caller)
    return answer({"success": True, "message": "resumed"})


async def _infos(gateway: Gateway, caller: Caller) -> list[dorad.ServerInfo]:
    limit = gateway.limits.timeout
    return await gateway.client_of(caller).every(lambda client: client.info(timeout=limit))


async def _is_paused(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """Whether a server is paused."""
    infos = await _infos(gateway, caller)
    return answer({"is_paused": any(i.engine.paused or i.engine.pausing for i in infos)})


# --- Sleeping -------------------------------------------------------------------------------------


def _server_tags(tags: list[_Tag]) -> list[Literal["weights", "kv", "adapters"]]:
    return [found for tag in tags for found in _TAGS[tag]]


async def _sleep(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """Frees device memory. Requests wait until /wake_up."""
    given = await fields.read(gateway, request, SleepRequest)
    tags = _server_tags(given.tags)
    limit = gateway.limits.timeout
    freed = await gateway.client_of(caller).every(lambda c: c.sleep(*tags, timeout=limit))
    return answer({"status": "sleeping", "freed_bytes": sum(sum(f.values()) for f in freed)})


async def _wake_up(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """Allocates the memory again."""
    given = await fields.read(gateway, request, WakeRequest)
    tags = _server_tags(given.tags)
    limit = gateway.limits.timeout
    await gateway.client_of(caller).every(lambda client: client.wake(*tags, timeout=limit))
    return answer({"status": "awake"})


async def _is_sleeping(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """Whether memory of a server is freed."""
    infos = await _infos(gateway, caller)
    return answer({"is_sleeping": any(info.engine.sleeping for info in infos)})


# --- Facts ----------------------------------------------------------------------------------------


async def _server_info(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """The parts of vLLM's configuration that clients read."""
    info = await gateway.client_of(caller).info(timeout=gateway.limits.timeout)
    model = await gateway.model()
    rl = gateway.servers.rl
    lora = {
        "max_lora_rank": info.limits.max_adapter_rank,
        "max_loras": _NO_LIMIT,
        "max_cpu_loras": _NO_LIMIT,
    }
    config: dict[str, Any] = {
        "model_config": {
            "model": model.name,
            "dtype": _TORCH_DTYPES[model.compute_dtype],
            "max_model_len": model.context_length,
            "logprobs_mode": f"{gateway.logprobs_mode}_logprobs",
        },
        "lora_config": lora if rl is not None and rl.adapter_roots else None,
        # A load reaches every server behind the gateway: to its callers they are one.
        "parallel_config": {"data_parallel_size": 1, "tensor_parallel_size": 1},
        "weight_transfer_config": None,
    }
    return answer({"vllm_config": config, "dorad": info.version})


async def _world_size(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """The number of servers behind the gateway."""
    return answer({"world_size": len(gateway.servers.targets)})


async def _reset_prefix_cache(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """Without effect: a cached prefix is of one version, so none is stale."""
    given = await fields.read(gateway, request, ResetRequest)
    if given.reset_running_requests:
        message = "requests in flight follow in_flight_policy; switch_recompute computes them again"
        raise Refusal(400, "FIELD_UNSUPPORTED", message, param="reset_running_requests")
    return answer({"success": True})


async def _finish_session(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """Without effect: requests of a session are not bound to a server."""
    await fields.read(gateway, request, SessionRequest)
    return answer({"success": True})


def routes(gateway: Gateway) -> list[Route]:
    def route(method: str, path: str, handler: Handler, body: type[Body] | None = None) -> Route:
        name = path.strip("/").replace("/", "_")
        return Route(
            path,
            Endpoint(gateway, name, handler, Refusal.body, body=body, body_required=False),
            methods=[method],
        )

    return [
        route("POST", "/pause", _pause, PauseRequest),
        route("POST", "/resume", _resume, NoFields),
        route("GET", "/is_paused", _is_paused),
        route("POST", "/areal_pause_generation", _areal_pause, NoFields),
        route("POST", "/areal_continue_generation", _areal_continue, NoFields),
        route("POST", "/sleep", _sleep, SleepRequest),
        route("POST", "/wake_up", _wake_up, WakeRequest),
        route("GET", "/is_sleeping", _is_sleeping),
        route("GET", "/server_info", _server_info),
        route("GET", "/get_world_size", _world_size),
        route("POST", "/reset_prefix_cache", _reset_prefix_cache, ResetRequest),
        route("POST", "/finish_session", _finish_session, SessionRequest),
    ]
