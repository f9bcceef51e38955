"""`POST /inference/v1/generate`: tokens in, tokens out, as vLLM has it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dorad.gateway import completions, requests, validation
from dorad.gateway.callers import Caller
from dorad.gateway.completions import Completion
from dorad.gateway.core import Gateway
from dorad.gateway.errors import Refusal
from dorad.gateway.http import Endpoint, long_answer, read_json, while_connected
from dorad.gateway.names import TokenNames
from dorad.gateway.responses import Answer, Usage, Versions
from dorad.gateway.samples import Choice, choices, versions
from dorad.gateway.validation import Body, TokenIds
from dorad.gateway.writing import Rows


class GenerateRequest(Body):
    model: str | None = None
    """As of a completion. Default: the base model."""
    token_ids: Annotated[TokenIds, Field(min_length=1)]
    """The prompt."""
    sampling_params: dict[str, Any] = Field(default={})
    """Fields of a completion: temperature, logprobs and so on. max_tokens is by default all that
    fits into the context."""
    cache_salt: str = ""
    """Only requests with equal salts share cached prefixes."""
    priority: int = 0
    """Lower values run first."""
    stream: Literal[False] = False
    output_mode: Literal["tokens"] = "tokens"
    request_id: str | None = None
    """Returned as it is."""
    return_token_ids: bool = False
    """Add prompt_token_ids."""


class TokensChoice(Answer):
    index: int
    token_ids: list[int]
    logprobs: dict[str, Any] | None
    finish_reason: str
    stop_reason: int | str | None
    dorad: Versions | None = None


class TokensResponse(Answer):
    request_id: str
    choices: list[TokensChoice]
    prompt_logprobs: list[dict[str, Any] | None] | None
    prompt_token_ids: list[int] | None = None
    usage: Usage


_NAMES = TokenNames(None, as_ids=True)
# Where an answer carries more than tokens: of models with experts, and of streams.
_IGNORED = ("routed_experts_prompt_start", "detokenize", "skip_special_tokens")
_WHOLE = (0, 2)  # vLLM's RequestOutputKind; 1 is a stream's.


async def _understand(
    gateway: Gateway, caller: Caller, raw: dict[str, Any]
) -> tuple[GenerateRequest, Completion]:
    body = requests.checked(await gateway.with_model(raw), GenerateRequest)
    params = {k: v for k, v in body.sampling_params.items() if k not in _IGNORED}
    if params.pop("output_kind", _WHOLE[0]) not in _WHOLE:
        message = "output_kind must be 0 or 2: answers are whole"
        raise Refusal(400, "FIELD_UNSUPPORTED", message, param="output_kind")
    for name in ("model", "prompt", "echo", "stream"):
        if name in params:
            message = f"sampling_params.{name}: Extra inputs are not permitted"
            raise Refusal(400, "FIELD_UNKNOWN", message, param=f"sampling_params.{name}")
    completion = {
        **params,
        "model": body.model,
        "prompt": body.token_ids,
        "cache_salt": body.cache_salt,
        "priority": body.priority,
    }
    return body, (await completions.understand(gateway, caller, completion, max_tokens=None))[0]


def _logprobs(choice: Choice) -> dict[str, Any]:
    return {"content": Rows(choice.piece.tokens, _NAMES.entry)}


async def _generate(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """Samples from token ids, with log-probabilities by token id."""
    raw = validation.parse(await read_json(request, gateway.limits))
    if isinstance(model := raw.get("model"), str):
        caller.record.model = model

    async def work() -> Response:
        body, completion = await _understand(gateway, caller, raw)
        work = completion.work
        found = await choices(
            gateway.client_of(caller),
            gateway.text if work.stops.strings else None,
            work,
            gateway.limits.timeout,
        )
        gateway.count_tokens(caller, work.tally.prompt_tokens, work.tally.completion_tokens)
        shown: dict[str, Any] = {
            "request_id": body.request_id or completion.id,
            "choices": [
                {
                    "index": index,
                    "token_ids": Rows(choice.piece.tokens, lambda token: token.id),
                    "logprobs": None if completion.logprobs is None else _logprobs(choice),
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                    **versions(choice.spans, choice.span),
                }
                for index, choice in enumerate(found)
            ],
            "prompt_logprobs": _NAMES.prompt_rows(
                work.prompts[0], found[0].prompt_logprobs, completion.prompt_logprobs
            ),
            "usage": work.tally.usage(),
        }
        if body.return_token_ids:
            shown["prompt_token_ids"] = Rows(work.prompts[0], int)
        return await long_answer(shown)

    return await while_connected(request.receive, work())


def routes(gateway: Gateway) -> list[Route]:
    endpoint = Endpoint(
        gateway,
        "generate",
        _generate,
        Refusal.body,
        body=GenerateRequest,
        answers=TokensResponse,
    )
    return [Route("/inference/v1/generate", endpoint, methods=["POST"])]
