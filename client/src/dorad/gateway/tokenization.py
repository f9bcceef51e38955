"""`POST /tokenize`, `POST /detokenize` and `GET /version`, as vLLM has them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import dorad
from dorad.gateway import chat, requests, validation
from dorad.gateway.callers import Caller
from dorad.gateway.core import LONG_TEXT, Gateway
from dorad.gateway.errors import Refusal
from dorad.gateway.http import Endpoint, answer, long_answer, read_json
from dorad.gateway.messages import AnyMessage
from dorad.gateway.requests import Templated
from dorad.gateway.responses import (
    Answer,
    DetokenizeResponse,
    TokenizeResponse,
    VersionResponse,
)
from dorad.gateway.validation import Body, TokenIds
from dorad.gateway.writing import Rows


class TokenizeRequest(Templated):
    """A `prompt` or the `messages` of a chat."""

    model: str | None = None
    """As of a completion. All models have the same tokenizer."""
    prompt: str | None = None
    messages: list[AnyMessage] | None = Field(default=None, min_length=1, fail_fast=True)
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens. Default: for a prompt, not for a chat."""
    return_token_strs: bool = False
    """Also the tokens as they stand in the vocabulary."""


class DetokenizeRequest(Body):
    model: str | None = None
    """As of a completion. All models have the same tokenizer."""
    tokens: TokenIds


async def _check_model(gateway: Gateway, caller: Caller, model: str | None) -> None:
    """Raises Refusal or NotFound for a model that the server does not have."""
    caller.record.model = model or ""
    adapter = None if model is None else await gateway.adapter_of(model)
    if adapter is not None:
        await gateway.client_of(caller).adapter(adapter)


async def _tokenize(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """The token ids of a prompt or a chat."""
    raw = validation.parse(await read_json(request, gateway.limits))
    body = requests.checked(raw, TokenizeRequest)
    if (body.prompt is None) == (body.messages is None):
        message = "give either prompt or messages"
        raise Refusal(400, "FIELD_MISSING", message, param="prompt")
    text = gateway.needs_text()
    await _check_model(gateway, caller, body.model)
    special = body.add_special_tokens
    if body.messages is not None:
        messages: list[Mapping[str, Any]] = [*body.messages]
        ids, _ = await chat.prompt_of(
            gateway, messages, body.template_variables(), special_tokens=bool(special)
        )
    else:
        ids = await gateway.encode(body.prompt or "", special_tokens=special is not False)
    return await long_answer(
        {
            "count": len(ids),
            "max_model_len": (await gateway.model()).context_length,
            "tokens": Rows(ids, int),
            "token_strs": Rows(ids, text.vocabulary_token) if body.return_token_strs else None,
        }
    )


async def _detokenize(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """The text of token ids, with special tokens."""
    raw = validation.parse(await read_json(request, gateway.limits))
    body = requests.checked(raw, DetokenizeRequest)
    text = gateway.needs_text()
    await _check_model(gateway, caller, body.model)
    if len(body.tokens) < LONG_TEXT:
        found = text.decode(body.tokens, skip_special_tokens=False)
    else:
        found = await asyncio.to_thread(text.decode, body.tokens, skip_special_tokens=False)
    return answer({"prompt": found})


async def _version(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """The gateway's version."""
    return answer({"version": dorad.__version__})


def routes(gateway: Gateway) -> list[Route]:
    def post(name: str, handler: Any, body: type[Body], answers: type[Answer]) -> Route:
        endpoint = Endpoint(gateway, name, handler, Refusal.body, body=body, answers=answers)
        return Route(f"/{name}", endpoint, methods=["POST"])

    version = Endpoint(
        gateway, "version", _version, Refusal.body, answers=VersionResponse, public=True
    )
    return [
        post("tokenize", _tokenize, TokenizeRequest, TokenizeResponse),
        post("detokenize", _detokenize, DetokenizeRequest, DetokenizeResponse),
        Route("/version", version, methods=["GET"]),
    ]
