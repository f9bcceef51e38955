"""OpenAI's HTTP API: the routes below /v1."""

from __future__ import annotations

import contextlib
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dorad import types as t
from dorad.gateway import chat, completions, validation
from dorad.gateway.callers import Caller
from dorad.gateway.core import Gateway
from dorad.gateway.errors import Refusal
from dorad.gateway.http import (
    Endpoint,
    EventStream,
    Handler,
    answer,
    long_answer,
    read_json,
    while_connected,
)
from dorad.gateway.requests import ChatRequest, CompletionRequest
from dorad.gateway.responses import (
    Answer,
    ChatChunk,
    ChatResponse,
    CompletionResponse,
    Model,
    ModelList,
)

_DONE = b"[DONE]"


async def _complete(
    gateway: Gateway, request: Request, caller: Caller, kind: Any, name: str
) -> Response:
    """`kind` is the module of the request: completions or chat."""
    body = await gateway.with_model(validation.parse(await read_json(request, gateway.limits)))
    if isinstance(model := body.get("model"), str):
        caller.record.model = model

    async def work() -> Response:
        understood, stream = await kind.understand(gateway, caller, body)
        tally = understood.work.tally
        if not stream:
            found = await kind.whole(gateway, caller, understood)
            gateway.count_tokens(caller, tally.prompt_tokens, tally.completion_tokens)
            return await long_answer(found)

        async def events() -> Any:
            try:
                async with contextlib.aclosing(kind.events(gateway, caller, understood)) as found:
                    async for event in found:
                        yield event
            finally:
                gateway.count_tokens(caller, tally.prompt_tokens, tally.completion_tokens)

        first = gateway.metrics.first_token(name)
        stream_of = EventStream(events(), caller, kind.error_body, last=_DONE, on_first=first)
        return await stream_of.begin()

    return await while_connected(request.receive, work())


async def _completions(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """Completes prompts."""
    return await _complete(gateway, request, caller, completions, "completions")


async def _chat(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """Answers a conversation."""
    return await _complete(gateway, request, caller, chat, "chat_completions")


# --- Models ---------------------------------------------------------------------------------------


def _base(gateway: Gateway, model: t.ModelInfo) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": gateway.started,
        "owned_by": "dorad",
        "root": model.name,
        "parent": None,
        "max_model_len": model.context_length,
    }


def _adapter(
    gateway: Gateway, model: t.ModelInfo, name: str, version: t.AdapterVersion
) -> dict[str, Any]:
    made = version.create_time
    return {
        "id": name,
        "object": "model",
        "created": gateway.started if made is None else int(made.timestamp()),
        "owned_by": "dorad",
        # The active version.
        "root": version.label,
        "parent": model.name,
        "max_model_len": model.context_length,
        "digest": version.digest,
    }


async def _models(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """The base model and the adapters with an active version."""
    versions = await gateway.client_of(caller).adapters()
    model = await gateway.model()
    rows = [_base(gateway, model)]
    rows += [_adapter(gateway, model, v.name, v) for v in versions if v.active]
    return answer({"object": "list", "data": rows})


async def _model(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """One model, by its id or as name@version."""
    name = request.path_params["model"]
    model = await gateway.model()
    if name == model.name:
        return answer(_base(gateway, model))
    version = await gateway.client_of(caller).adapter(name)
    return answer(_adapter(gateway, model, name, version))


def routes(gateway: Gateway) -> list[Route]:
    def get(name: str, handler: Handler, answers: type[Answer]) -> Endpoint:
        return Endpoint(gateway, name, handler, Refusal.body, answers=answers)

    completions_endpoint = Endpoint(
        gateway,
        "completions",
        _completions,
        completions.error_body,
        body=CompletionRequest,
        answers=CompletionResponse,
        events=CompletionResponse,
    )
    chat_endpoint = Endpoint(
        gateway,
        "chat_completions",
        _chat,
        chat.error_body,
        body=ChatRequest,
        answers=ChatResponse,
        events=ChatChunk,
    )
    return [
        Route("/v1/models", get("models", _models, ModelList), methods=["GET"]),
        Route("/v1/models/{model:path}", get("model", _model, Model), methods=["GET"]),
        Route("/v1/completions", completions_endpoint, methods=["POST"]),
        Route("/v1/chat/completions", chat_endpoint, methods=["POST"]),
    ]
