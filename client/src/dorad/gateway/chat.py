"""`POST /v1/chat/completions`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dorad import types as t
from dorad.gateway import requests
from dorad.gateway.assembler import Token
from dorad.gateway.callers import Caller
from dorad.gateway.core import Gateway
from dorad.gateway.errors import Refusal
from dorad.gateway.images import urls_of
from dorad.gateway.names import TokenNames
from dorad.gateway.requests import ChatRequest
from dorad.gateway.samples import Work, choices, updates, versions
from dorad.gateway.writing import Rows
from dorad.text import ModelText
from dorad.types import GenerateOptions


@dataclass(slots=True)
class Chat:
    """A checked request."""

    id: str
    model: str
    work: Work
    names: TokenNames
    logprobs: bool
    prompt_logprobs: int | None
    return_token_ids: bool
    include_usage: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def error_body(refusal: Refusal) -> dict[str, Any]:
    """Chats call the server's logprobs.top_k `top_logprobs`; completions call it `logprobs`."""
    body = refusal.body()
    if refusal.reason == "LOGPROBS_K_OUT_OF_RANGE":
        body["error"]["param"] = "top_logprobs"
    return body


async def understand(gateway: Gateway, caller: Caller, raw: Mapping[str, Any]) -> tuple[Chat, bool]:
    """Returns the checked request and whether to stream. Raises Refusal or DoradError."""
    body = requests.checked(raw, ChatRequest)
    text = gateway.needs_text()
    if body.top_logprobs is not None and not body.logprobs:
        message = "top_logprobs needs logprobs: true"
        raise Refusal(400, "LOGPROBS_MISSING", message, param="top_logprobs")
    body.check_logprobs()
    gateway.check_choices([None], body.n)
    model = await gateway.model()
    adapter = await gateway.adapter_of(body.model)
    max_tokens = body.max_completion_tokens
    max_tokens = body.max_tokens if max_tokens is None else max_tokens
    prompt, images = await prompt_of(gateway, body.messages, body.template_variables())
    if images and body.truncate_prompt_tokens is not None:
        message = "truncate_prompt_tokens is not available with images"
        raise Refusal(400, "FIELD_UNSUPPORTED", message, param="truncate_prompt_tokens")
    prompt = body.kept(prompt, model, max_tokens)
    options: GenerateOptions = {
        **body.options(text),
        "images": images or None,
        "drafts": await _drafts(gateway, body),
        "adapter": adapter,
        "max_tokens": max_tokens,
        "request_id": caller.call_id(),
        **body.logprob_options(
            (body.logprobs_mode or gateway.logprobs_mode) if body.logprobs else None,
            body.top_logprobs,
        ),
    }
    chat = Chat(
        id=f"chatcmpl-{options['request_id']}",
        model=body.model,
        work=body.work(
            [prompt], options, model, stream=body.stream, top_logprobs=body.top_logprobs
        ),
        names=TokenNames(text, as_ids=body.return_tokens_as_token_ids),
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs,
        return_token_ids=body.return_token_ids,
        include_usage=body.stream_options.include_usage,
    )
    return chat, body.stream


async def _drafts(gateway: Gateway, body: ChatRequest) -> list[list[int]] | None:
    """Those of the request, or its prediction for every choice. Raises Refusal."""
    if body.prediction is None:
        return body.drafts
    if body.drafts is not None:
        message = "prediction and drafts exclude each other"
        raise Refusal(400, "FIELD_INVALID", message, param="prediction")
    return [await gateway.encode(body.prediction.text, special_tokens=False)] * body.n


async def prompt_of(
    gateway: Gateway,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    *,
    special_tokens: bool = False,
) -> tuple[list[int], list[t.Image]]:
    """The token ids and images of a conversation. Raises Refusal and DoradError."""
    urls = urls_of(messages)
    prompt_text = written(gateway.needs_text(), messages, variables)
    if not urls:
        return await gateway.encode(prompt_text, special_tokens=special_tokens), []
    limits = (await gateway.info()).limits
    gateway.images.check(urls, limits)
    return await gateway.images.place(prompt_text, urls, limits, special_tokens=special_tokens)


def written(
    text: ModelText, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> str:
    """The conversation as the chat template writes it. Raises Refusal."""
    if not text.has_chat_template:
        message = "the tokenizer's folder has no chat template; /v1/completions takes plain text"
        raise Refusal(400, "CHAT_TEMPLATE_MISSING", message, param="messages")
    try:
        return text.render_chat([_message(m) for m in messages], **variables)
    except (ValueError, TypeError) as error:
        raise Refusal(400, "CHAT_TEMPLATE_REFUSED", str(error), param="messages") from None


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Joins content parts, because templates expect text. Those of models with images expect parts,
    too, and place an image where its part is."""
    content = message.get("content") or ""
    if isinstance(content, list):
        if any(part["type"] == "image_url" for part in content):
            content = [p if p["type"] == "text" else {"type": "image"} for p in content]
        else:
            content = "".join(part["text"] for part in content)
    found = {**message, "content": content}
    if not found.get("tool_calls"):
        found.pop("tool_calls", None)  # Templates ask whether a message has the field.
    return found


def _logprobs(chat: Chat, tokens: list[Token]) -> dict[str, Any] | None:
    if not chat.logprobs:
        return None
    return {"content": Rows(tokens, chat.names.entry), "refusal": None}


async def whole(gateway: Gateway, caller: Caller, chat: Chat) -> dict[str, Any]:
    """The whole answer."""
    work = chat.work
    found = await choices(gateway.client_of(caller), gateway.text, work, gateway.limits.timeout)
    answer: dict[str, Any] = {**chat.head("chat.completion"), "choices": []}
    for index, choice in enumerate(found):
        shown: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": choice.piece.text},
            "logprobs": _logprobs(chat, choice.piece.tokens),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **versions(choice.spans, choice.span),
        }
        if chat.return_token_ids:
            shown["token_ids"] = Rows(choice.piece.tokens, lambda token: token.id)
        answer["choices"].append(shown)
    if chat.return_token_ids:
        answer["prompt_token_ids"] = Rows(work.prompts[0], int)
    if chat.prompt_logprobs is not None:
        answer["prompt_logprobs"] = chat.names.prompt_rows(
            work.prompts[0], found[0].prompt_logprobs, chat.prompt_logprobs
        )
    answer["usage"] = work.tally.usage()
    return answer


async def events(gateway: Gateway, caller: Caller, chat: Chat) -> AsyncGenerator[dict[str, Any]]:
    """The events of a streamed answer, without the last "[DONE]"."""
    work, begun = chat.work, set[int]()
    client = gateway.client_of(caller)
    async with contextlib.aclosing(
        updates(client, gateway.text, work, gateway.limits.timeout)
    ) as incoming:
        async for update in incoming:
            delta: dict[str, Any] = {}
            if update.index not in begun:
                delta["role"] = "assistant"
            if update.piece.text or delta:
                delta["content"] = update.piece.text
            if not (delta or update.piece.tokens or update.finish_reason):
                continue
            shown: dict[str, Any] = {
                "index": update.index,
                "delta": delta,
                "logprobs": _logprobs(chat, update.piece.tokens),
                "finish_reason": update.finish_reason,
                **versions(update.spans, update.span),
            }
            if update.finish_reason is not None:
                shown["stop_reason"] = update.stop_reason
            if chat.return_token_ids:
                shown["token_ids"] = Rows(update.piece.tokens, lambda token: token.id)
            event = {**chat.head("chat.completion.chunk"), "choices": [shown]}
            if chat.return_token_ids and not begun:
                event["prompt_token_ids"] = Rows(work.prompts[0], int)
            begun.add(update.index)
            yield event
    if chat.include_usage:
        yield {
            **chat.head("chat.completion.chunk"),
            "choices": [],
            "usage": work.tally.usage(),
        }
