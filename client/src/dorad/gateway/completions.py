"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dorad import types as t
from dorad.errors import Violation
from dorad.gateway import requests
from dorad.gateway.assembler import Piece, Token
from dorad.gateway.callers import Caller
from dorad.gateway.core import Gateway
from dorad.gateway.errors import Refusal
from dorad.gateway.names import TokenNames
from dorad.gateway.requests import CompletionRequest
from dorad.gateway.samples import (
    Choice,
    Update,
    Work,
    choices,
    first_columns,
    updates,
    versions,
)
from dorad.gateway.servers import Calls
from dorad.gateway.writing import Rows
from dorad.text import ModelText
from dorad.types import GenerateOptions


@dataclass(slots=True)
class Completion:
    """A checked request."""

    id: str
    model: str
    adapter: str | None
    work: Work
    names: TokenNames
    logprobs: int | None
    prompt_logprobs: int | None
    echo: list[Piece] | None
    """One piece for each prompt, with `echo`."""
    generates: bool
    """False: only echo the prompts (max_tokens is 0)."""
    scored_by: t.Span | None
    """The version that scored the echo, if nothing is generated."""
    scores: list[t.PromptLogprobs | None]
    """Of each prompt, once they have come."""
    return_token_ids: bool
    include_usage: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
        }


error_body = Refusal.body


async def understand(
    gateway: Gateway, caller: Caller, raw: Mapping[str, Any], *, max_tokens: int | None = 16
) -> tuple[Completion, bool]:
    """Returns the checked request and whether to stream. Raises Refusal or DoradError.

    `max_tokens`: of a request that does not say. None: all that fits into the context.
    """
    body = requests.checked(raw, CompletionRequest)
    if body.max_tokens is not None:
        max_tokens = body.max_tokens
    if body.best_of not in (None, body.n):
        raise Refusal(400, "FIELD_UNSUPPORTED", "best_of must be n", param="best_of")
    if max_tokens == 0 and not body.echo:
        message = "max_tokens must be at least 1 without echo"
        raise Refusal(400, "MAX_TOKENS_OUT_OF_RANGE", message, param="max_tokens")
    # What was not sampled has no other mode.
    mode = body.logprobs_mode or ("raw" if body.echo else gateway.logprobs_mode)
    if body.echo and body.logprobs is not None and mode != "raw":
        message = "logprobs of an echo are raw: nothing of it was sampled"
        raise Refusal(400, "FIELD_UNSUPPORTED", message, param="logprobs_mode")
    body.check_logprobs()
    if body.stop or body.bad_words:
        gateway.needs_text()
    model = await gateway.model()
    adapter = await gateway.adapter_of(body.model)
    prompts = [body.kept(p, model, max_tokens) for p in await _prompts(gateway, body)]
    options: GenerateOptions = {
        **body.options(gateway.text),
        "adapter": adapter,
        "max_tokens": max_tokens,
        "request_id": caller.call_id(),
        **body.logprob_options(None if body.logprobs is None else mode, body.logprobs),
    }
    if body.echo and body.logprobs is not None:
        options["prompt_logprobs"] = True
    work = body.work(prompts, options, model, stream=body.stream, top_logprobs=body.logprobs)
    completion = Completion(
        id=f"cmpl-{options['request_id']}",
        model=body.model,
        adapter=adapter,
        work=work,
        names=TokenNames(gateway.text, as_ids=body.return_tokens_as_token_ids),
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs,
        echo=None,
        generates=max_tokens != 0,
        scored_by=None,
        scores=[None] * len(prompts),
        # Without a tokenizer they are all that there is.
        return_token_ids=body.return_token_ids or gateway.text is None,
        include_usage=body.stream_options.include_usage,
    )
    if body.echo:
        _check_lengths(completion, model)
        completion.echo = await _echoes(work, gateway.text)
        if not completion.generates:
            await _score(gateway, gateway.client_of(caller), completion)
    return completion, work.stream


async def _prompts(gateway: Gateway, body: CompletionRequest) -> list[list[int]]:
    given: Any = body.prompt
    several = isinstance(given, list) and not isinstance(given[0], int)
    prompts = given if several else [given]
    gateway.check_choices(prompts, body.n)
    special = body.add_special_tokens
    found = [
        await gateway.encode(p, special_tokens=special) if isinstance(p, str) else p
        for p in prompts
    ]
    if not all(found):
        message = "a prompt has no tokens, and the tokenizer adds none"
        raise Refusal(400, "PROMPT_EMPTY", message, param="prompt")
    return found


def _check_lengths(completion: Completion, model: t.ModelInfo) -> None:
    """Checks the length like the server, which gets a prompt only after its echo, or never."""
    longest = model.context_length - (1 if completion.generates else 0)
    for prompt in completion.work.prompts:
        if len(prompt) > longest:
            field, what = "prompt_token_ids", f"{len(prompt)} token ids are more than {longest}"
            problem = Violation(field, what, "PROMPT_TOO_LONG")
            message = f"GenerateRequest: {field}: {what}"
            raise Refusal(400, problem.reason, message, param=field, violations=[problem])


async def _score(gateway: Gateway, client: Calls, completion: Completion) -> None:
    """Scores the prompts of a request that generates nothing, if it asks for log-probabilities."""
    work = completion.work
    work.tally.prompt_tokens = sum(len(prompt) for prompt in work.prompts)
    wanted = (completion.logprobs, completion.prompt_logprobs)
    counts = [k for k in wanted if k is not None]
    if not counts:
        return
    scored = await client.score(
        work.prompts,
        [completion.adapter],
        top_k=max(counts) or None,
        request_id=f"{work.options['request_id']}-echo",
        timeout=gateway.limits.timeout,
    )
    completion.scored_by = scored.versions[0]
    for prompt in range(len(work.prompts)):
        top = None if scored.top_logprobs is None else scored.top_logprobs[prompt][0]
        await _take_scores(completion, prompt, t.PromptLogprobs(scored[prompt, 0], top, None))


async def _take_scores(completion: Completion, prompt: int, scores: t.PromptLogprobs) -> None:
    completion.scores[prompt] = scores
    if completion.echo is not None and completion.logprobs is not None:
        tokens, top = completion.echo[prompt].tokens, completion.work.top_logprobs
        await asyncio.to_thread(_add_scores, tokens, scores, top)


def _add_scores(tokens: list[Token], scores: t.PromptLogprobs, count: int | None) -> None:
    top = first_columns(scores.top_logprobs, count)
    for position, token in enumerate(tokens):
        if position > 0:
            token.logprob = float(scores.logprobs[position])
            if top is not None:
                ids, values = top.token_ids[position], top.logprobs[position]
                token.top = list(zip(ids.tolist(), values.tolist(), strict=True))


async def _echoes(work: Work, text: ModelText | None) -> list[Piece]:
    """Text and tokens of the prompts. Without a tokenizer (`text` is None) tokens only."""
    return await asyncio.to_thread(_pieces, work, text)


def _pieces(work: Work, text: ModelText | None) -> list[Piece]:
    found = []
    for prompt in work.prompts:
        decoder = (
            None if text is None else text.stream(skip_special_tokens=work.skip_special_tokens)
        )
        tokens, parts, offset = list[Token](), list[str](), 0
        for token_id in prompt:
            tokens.append(Token(token_id, None, [], offset))
            if decoder is not None:
                parts.append(decoder.push([token_id]))
                offset += len(parts[-1])
        if decoder is not None:
            parts.append(decoder.finish())
        found.append(Piece("".join(parts), tokens))
    return found


def _with_echo(completion: Completion, index: int, piece: Piece, *, first: bool) -> Piece:
    """Moves offsets behind the echoed prompt. The first piece of a choice begins with the echo."""
    if completion.echo is None:
        return piece
    echo = completion.echo[index // completion.work.n]
    tokens = [
        Token(token.id, token.logprob, token.top, token.offset + len(echo.text))
        for token in piece.tokens
    ]
    if not first:
        return Piece(piece.text, tokens)
    return Piece(echo.text + piece.text, echo.tokens + tokens)


def _choice(
    completion: Completion, index: int, piece: Piece, of: Choice | Update
) -> dict[str, Any]:
    """`of` ends as it ends, and its tokens are of its versions."""
    found: dict[str, Any] = {
        "index": index,
        "text": piece.text,
        "logprobs": None,
        "finish_reason": of.finish_reason,
        "stop_reason": of.stop_reason,
        **versions(of.spans, of.span),
    }
    if completion.logprobs is not None:
        names = completion.names
        found["logprobs"] = {
            "tokens": Rows(piece.tokens, lambda token: names.name(token.id)),
            "token_logprobs": Rows(piece.tokens, lambda token: names.value(token.logprob)),
            "top_logprobs": Rows(piece.tokens, names.table),
            "text_offset": Rows(piece.tokens, lambda token: token.offset),
        }
    if completion.return_token_ids:
        found["token_ids"] = Rows(piece.tokens, lambda token: token.id)
        found["prompt_token_ids"] = Rows(completion.work.prompts[index // completion.work.n], int)
    return found


async def whole(gateway: Gateway, caller: Caller, completion: Completion) -> dict[str, Any]:
    """The whole answer."""
    work = completion.work
    if completion.generates:
        found = await choices(gateway.client_of(caller), gateway.text, work, gateway.limits.timeout)
        for prompt, choice in enumerate(found[:: work.n]):
            if choice.prompt_logprobs is not None:
                await _take_scores(completion, prompt, choice.prompt_logprobs)
    else:
        nothing = Choice(finish_reason="length", span=completion.scored_by)
        found = [nothing] * (len(work.prompts) * work.n)
    shown = [
        _choice(completion, i, _with_echo(completion, i, c.piece, first=True), c)
        for i, c in enumerate(found)
    ]
    if completion.prompt_logprobs is not None:
        for i, row in enumerate(shown):
            prompt = i // work.n
            row["prompt_logprobs"] = completion.names.prompt_rows(
                work.prompts[prompt], completion.scores[prompt], completion.prompt_logprobs
            )
    return {**completion.head(), "choices": shown, "usage": work.tally.usage()}


async def events(
    gateway: Gateway, caller: Caller, completion: Completion
) -> AsyncGenerator[dict[str, Any]]:
    """The events of a streamed answer, without the last "[DONE]"."""
    work, begun = completion.work, set[int]()
    async with contextlib.aclosing(_updates(gateway, caller, completion)) as incoming:
        async for update in incoming:
            first = update.index not in begun
            begun.add(update.index)
            if update.prompt_logprobs is not None:
                # With the first token of the prompt's first choice, which precedes the others.
                await _take_scores(completion, update.index // work.n, update.prompt_logprobs)
            piece = _with_echo(completion, update.index, update.piece, first=first)
            if not (piece.text or piece.tokens or update.finish_reason):
                continue
            choice = _choice(completion, update.index, piece, update)
            if not first:
                choice.pop("prompt_token_ids", None)
            yield {**completion.head(), "choices": [choice]}
    if completion.include_usage:
        yield {**completion.head(), "choices": [], "usage": work.tally.usage()}


async def _updates(
    gateway: Gateway, caller: Caller, completion: Completion
) -> AsyncGenerator[Update]:
    work = completion.work
    if completion.generates:
        client = gateway.client_of(caller)
        async with contextlib.aclosing(
            updates(client, gateway.text, work, gateway.limits.timeout)
        ) as incoming:
            async for update in incoming:
                yield update
        return
    for index in range(len(work.prompts) * work.n):
        yield Update(index, Piece(), "length", span=completion.scored_by)
        await asyncio.sleep(0)
