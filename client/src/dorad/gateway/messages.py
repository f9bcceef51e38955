"""The messages of a chat as pydantic models."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

import pydantic_core
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    with_config,
)
from typing_extensions import TypedDict

from dorad.gateway.validation import kind_of, union


@with_config(extra="allow")
class TextPart(TypedDict):
    type: Literal["text"]
    text: str


@with_config(extra="allow")
class ImageUrl(TypedDict):
    url: str
    detail: NotRequired[Literal["auto", "low", "high"] | None]


@with_config(extra="allow")
class ImagePart(TypedDict):
    """A picture as a data URL (PNG, JPEG, WebP), or a file below the gateway's --image-root. The
    model's processor chooses its size: `detail` has no effect."""

    type: Literal["image_url"]
    image_url: Annotated[
        Annotated[str, Tag("<string>")] | Annotated[ImageUrl, Tag("<object>")],
        Discriminator(
            lambda value: "<string>" if isinstance(value, str) else "<object>",
        ),
    ]


_PARTS = "text and image_url"
_OTHER_PARTS = {
    "video_url": ("video", "videos are not served: send frames as images"),
    "video": ("video", "videos are not served: send frames as images"),
    "input_audio": ("audio", "sounds are not served"),
    "audio_url": ("audio", "sounds are not served"),
    "audio": ("audio", "sounds are not served"),
}


def _kind_of_part(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"<{kind}>" if kind in ("text", "image_url") else None


def _served_part(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in ("text", "image_url"):
        name, message = _OTHER_PARTS.get(kind, ("part", f"parts are of type {_PARTS}"))
        raise pydantic_core.PydanticCustomError(
            name,
            "a part of type {kind}: {message}",
            {"kind": kind[:60], "message": message},
        )
    return value


Part = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[ImagePart, Tag("<image_url>")],
    Discriminator(
        _kind_of_part,
        custom_error_type="union",
        custom_error_message=f"Input should be a part of type {_PARTS}",
    ),
    BeforeValidator(_served_part),
]


def _arguments(value: Any) -> dict[str, Any]:
    """OpenAI writes a call's arguments as JSON; templates expect them as an object, as in vLLM."""
    if isinstance(value, str):
        value = pydantic_core.from_json(value or "{}", allow_inf_nan=False)
    if not isinstance(value, dict):
        raise ValueError("Input should be a JSON object, or a string of one")
    return value


@with_config(extra="allow")
class FunctionCall(TypedDict):
    name: str
    arguments: NotRequired[
        Annotated[
            Any,
            AfterValidator(_arguments),
            WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]}),
        ]
    ]


@with_config(extra="allow")
class ToolCall(TypedDict):
    id: NotRequired[str | None]
    type: NotRequired[Literal["function"]]
    function: FunctionCall


Content = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[list[Part], Field(fail_fast=True), Tag("<list>")],
    union(kind_of, "a string or a list of parts"),
]


Texts = Annotated[
    Annotated[str, Tag("<string>")]
    | Annotated[list[TextPart], Field(fail_fast=True), Tag("<list>")],
    union(kind_of, "a string or a list of parts of type text"),
]


@with_config(extra="allow")
class Message(TypedDict):
    """All fields reach the chat template, such as a tool's `tool_call_id`."""

    role: str
    content: Content
    name: NotRequired[str | None]


@with_config(extra="allow")
class CallingMessage(TypedDict):
    """A message that calls tools, with or without a content."""

    role: Literal["assistant"]
    content: NotRequired[
        Annotated[
            Annotated[None, Tag("<none>")] | Annotated[Content, Tag("<some>")],
            Discriminator(lambda value: "<none>" if value is None else "<some>"),
        ]
    ]
    name: NotRequired[str | None]
    tool_calls: Annotated[list[ToolCall], Field(min_length=1, fail_fast=True)]


def _kind_of_message(value: Any) -> str:
    calls = isinstance(value, dict) and value.get("tool_calls")
    return "<calls>" if calls else "<message>"


AnyMessage = Annotated[
    Annotated[Message, Tag("<message>")] | Annotated[CallingMessage, Tag("<calls>")],
    Discriminator(_kind_of_message),
]
