"""The fields of completion requests: one table for checking, for documenting and for refusing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dorad import types as t
from dorad.errors import Violation
from dorad.gateway import schema
from dorad.gateway.assembler import stops_of
from dorad.gateway.samples import Work
from dorad.gateway.schema import TOKEN_IDS, UINT32

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256

_NUMBER = {"type": "number"}
_BOOLEAN = {"type": "boolean"}
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}


def _says(schema: Mapping[str, Any], description: str) -> dict[str, Any]:
    return {**schema, "description": description}


# Ranges are the server's to judge; here is what the wire could not carry.
SHARED: dict[str, Any] = {
    "model": _says({"type": "string"}, "The base model's id, an adapter's name or name@version."),
    "n": _says({**UINT32, "minimum": 1}, "Choices of each prompt."),
    "temperature": _says(_NUMBER, "Default 1; 0 is greedy."),
    "top_p": _says(_NUMBER, "Default 1."),
    "top_k": _says({"type": "integer", "minimum": -1, "maximum": 2**31 - 1}, "-1 and 0: all."),
    "min_p": _says(_NUMBER, "Default 0."),
    "seed": _says({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, "Repeats a sample."),
    "min_tokens": _says(UINT32, "No stop before so many tokens."),
    "stop": _says(
        {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOP_STRINGS}]},
        "Strings that end a choice.",
    ),
    "stop_token_ids": _says(TOKEN_IDS, "Tokens that end a choice, besides the model's own."),
    "include_stop_str_in_output": _says(_BOOLEAN, "Keep the stop string in the text."),
    "ignore_eos": _says(_BOOLEAN, "Do not stop at the model's own end tokens."),
    "skip_special_tokens": _says(_BOOLEAN, "Default true: special tokens have no text."),
    "stream": _says(_BOOLEAN, "Server-sent events."),
    "stream_options": _says(
        {
            "type": "object",
            "properties": {"include_usage": _BOOLEAN},
            "additionalProperties": False,
        },
        "include_usage: one more event at the end, with the usage.",
    ),
    "priority": _says(
        {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1}, "Lower runs first."
    ),
    "cache_salt": _says({"type": "string"}, "Prefixes are shared among equal salts only."),
    "return_token_ids": _says(_BOOLEAN, "Add the token ids of prompt and choices."),
    "return_tokens_as_token_ids": _says(
        _BOOLEAN, 'Log-probabilities name tokens "token_id:7" instead of by their text.'
    ),
}

# Known and without effect here.
_IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "parallel_tool_calls",
)
# Fields that the server cannot honour, with the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"], []),
}

COMPLETION: dict[str, Any] = {
    "type": "object",
    "required": ["model", "prompt"],
    "additionalProperties": False,
    "properties": {
        **SHARED,
        "prompt": _says(
            {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string"}, "minItems": 1},
                    {**TOKEN_IDS, "minItems": 1},
                    {"type": "array", "items": {**TOKEN_IDS, "minItems": 1}, "minItems": 1},
                ]
            },
            "One prompt or several, as text or as token ids.",
        ),
        "max_tokens": _says(UINT32, "Default 16. 0 only with echo."),
        "logprobs": _says(UINT32, "Log-probabilities, also of so many most likely tokens."),
        "echo": _says(_BOOLEAN, "Begin each choice with its prompt."),
        "best_of": _says(UINT32, "Equal to n, if given."),
        "add_special_tokens": _says(_BOOLEAN, "Default true: as the tokenizer begins a text."),
    },
}

_CONTENT: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "text"],
                "properties": {
                    "type": {"type": "string", "enum": ["text"]},
                    "text": {"type": "string"},
                },
            },
        },
    ]
}

CHAT: dict[str, Any] = {
    "type": "object",
    "required": ["model", "messages"],
    "additionalProperties": False,
    "properties": {
        **SHARED,
        "messages": _says(
            {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "required": ["role", "content"],
                    "properties": {
                        "role": {"type": "string"},
                        "content": _CONTENT,
                        "name": {"type": "string"},
                    },
                },
            },
            "The conversation; content is text, or a list of parts of type text.",
        ),
        "max_tokens": _says(UINT32, "As max_completion_tokens."),
        "max_completion_tokens": _says(UINT32, "Default: what fits into the context."),
        "logprobs": _says(_BOOLEAN, "Log-probabilities of the choice's tokens."),
        "top_logprobs": _says(UINT32, "With logprobs: also of so many most likely tokens."),
        "chat_template_kwargs": _says({"type": "object"}, "Variables for the chat template."),
    },
}


def checked(body: Mapping[str, Any], table: schema.Schema) -> dict[str, Any]:
    """The fields that say something. Raises Refusal that lists the problems of every field.

    What the server cannot do is refused rather than left out: an answer that silently lacks a
    penalty or a tool is wrong.
    """
    problems = []
    kept = {}
    for name, value in body.items():
        if name in _IGNORED:
            continue
        if name not in _NEUTRAL:
            kept[name] = value
        elif value is not None and value not in _NEUTRAL[name]:
            problems.append(Violation(name, "is not supported", "FIELD_UNSUPPORTED"))
    return schema.checked(kept, table, problems)


def sampling(body: Mapping[str, Any]) -> t.GenerateOptions:
    """The options that completions and chats have in common."""
    top_k = body.get("top_k")
    return {
        "n": body.get("n", 1),
        "temperature": body.get("temperature"),
        "top_p": body.get("top_p"),
        "top_k": top_k if top_k and top_k > 0 else None,
        "min_p": body.get("min_p"),
        "seed": body.get("seed"),
        "min_tokens": body.get("min_tokens"),
        "stop_token_ids": body.get("stop_token_ids"),
        "ignore_eos": body.get("ignore_eos", False),
        "priority": body.get("priority"),
        "cache_salt": body.get("cache_salt", ""),
    }


def work(
    body: Mapping[str, Any],
    prompts: list[list[int]],
    options: t.GenerateOptions,
    model: t.ModelInfo,
) -> Work:
    """What is to be done for a request, which says how and where its choices end."""
    eos = frozenset(() if body.get("ignore_eos") else model.eos_token_ids)
    return Work(
        prompts=prompts,
        options=options,
        stops=stops_of(
            stop_strings(body),
            [*eos, *body.get("stop_token_ids", ())],
            include=body.get("include_stop_str_in_output", False),
            min_tokens=body.get("min_tokens", 0),
        ),
        n=body.get("n", 1),
        stream=body.get("stream", False),
        eos_token_ids=eos,
        skip_special_tokens=body.get("skip_special_tokens", True),
    )


def stop_strings(body: Mapping[str, Any]) -> list[str]:
    stop = body.get("stop") or []
    return [stop] if isinstance(stop, str) else list(stop)
