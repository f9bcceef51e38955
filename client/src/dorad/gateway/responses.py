"""The answers as pydantic models: the schemas of the OpenAPI document.

Answers are written without them, token by token; tests read answers into them.
"""

from __future__ import annotations

from typing import Any

import pydantic


class Answer(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(
        strict=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )


# --- OpenAI ---------------------------------------------------------------------------------------


class Version(Answer):
    """The version that made tokens. All null: the base model."""

    adapter: str | None
    version: int | None
    digest: str | None


class VersionSpan(Version):
    begin: int
    end: int
    """Counted from the first generated token of the choice."""


class Versions(Version):
    """Of the choice's newest token."""

    spans: list[VersionSpan]
    """Of the tokens of this answer or event."""


class Choice(Answer):
    index: int
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    """stop, length, abort or error; null: the choice goes on."""
    stop_reason: int | str | None = None
    """The stop string or the token that ended the choice."""
    dorad: Versions | None = None
    token_ids: list[int] | None = None


class CompletionChoice(Choice):
    text: str
    prompt_token_ids: list[int] | None = None


class Message(Answer):
    role: str
    content: str


class ChatChoice(Choice):
    message: Message


class Delta(Answer):
    role: str | None = None
    content: str | None = None


class ChatChunkChoice(Choice):
    delta: Delta


class PromptTokensDetails(Answer):
    cached_tokens: int


class CompletionTokensDetails(Answer):
    accepted_prediction_tokens: int
    """Guessed tokens that were right. They are among `completion_tokens`."""
    rejected_prediction_tokens: int
    """Guessed tokens that the server verified and that were wrong. They are not."""


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class _Head(Answer):
    id: str
    object: str
    created: int
    model: str
    usage: Usage | None = None
    """Of a stream: in the last event, with `stream_options.include_usage`."""


class CompletionResponse(_Head):
    """A whole answer, or one event of a stream."""

    choices: list[CompletionChoice]


class ChatResponse(_Head):
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = None


class ChatChunk(_Head):
    """One event of a stream."""

    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | None = None


class Model(Answer):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    """The active version, or the base model itself."""
    parent: str | None
    max_model_len: int
    digest: str | None = None


class ModelList(Answer):
    object: str
    data: list[Model]


# --- As in vLLM -----------------------------------------------------------------------------------


class TokenizeResponse(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(Answer):
    prompt: str


class VersionResponse(Answer):
    version: str


# --- The Open Inference Protocol ------------------------------------------------------------------


class OutputTensor(Answer):
    name: str
    datatype: str
    shape: list[int]
    data: list[Any] | None = None
    parameters: dict[str, int] | None = None
    """`binary_data_size`: the tensor is behind the JSON."""


class InferResponse(Answer):
    model_name: str
    model_version: str
    id: str | None = None
    parameters: dict[str, Any]
    outputs: list[OutputTensor]


class GenerateResponse(Answer):
    """A whole answer, or one event of a stream."""

    model_name: str
    model_version: str
    id: str | None = None
    output_ids: list[int]
    text_output: str | None = None
    finish_reason: str
    parameters: dict[str, Any]


class TensorMetadata(Answer):
    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(Answer):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ModelReady(Answer):
    name: str
    ready: bool


class ServerMetadata(Answer):
    name: str
    version: str
    extensions: list[str]


class Live(Answer):
    live: bool


class Ready(Answer):
    ready: bool


class IndexRow(Answer):
    name: str
    version: str
    state: str
    reason: str


class Index(pydantic.RootModel[list[IndexRow]]):
    """The base model and every version of every adapter."""
