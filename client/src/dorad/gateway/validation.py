"""Reads JSON bodies into pydantic models. A Refusal names every invalid field."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

import pydantic
import pydantic_core
from pydantic import Discriminator, Field

from dorad.errors import Violation
from dorad.gateway.errors import Refusal

UInt32 = Annotated[int, Field(ge=0, le=2**32 - 1)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(fail_fast=True)]

_REASONS = {
    "missing": "FIELD_MISSING",
    "extra_forbidden": "FIELD_UNKNOWN",
    "video": "VIDEO_UNSUPPORTED",
    "audio": "AUDIO_UNSUPPORTED",
}


class Body(pydantic.BaseModel):
    """A JSON object. Fields that are null count as absent, and types are not converted."""

    model_config = pydantic.ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


def kind_of(value: Any) -> str | None:
    """The tag of a union's member: pydantic then reports the errors of this member only."""
    if isinstance(value, list):
        return "<list>"
    return "<string>" if isinstance(value, str) else None


def union(kind: Callable[[Any], str | None], expected: str) -> Discriminator:
    return Discriminator(
        kind, custom_error_type="union", custom_error_message=f"Input should be {expected}"
    )


M = TypeVar("M", bound=Body)


def parse(body: bytes) -> dict[str, Any]:
    """A JSON object in UTF-8.

    Raises Refusal, also for NaN, Infinity and unpaired surrogates.
    """
    try:
        value = pydantic_core.from_json(body.removeprefix(codecs.BOM_UTF8), allow_inf_nan=False)
    except ValueError as error:
        raise Refusal(400, "BODY_NOT_JSON", f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Refusal(400, "BODY_NOT_JSON", "the body is not a JSON object")
    return value


def checked(body: Mapping[str, Any], model: type[M], known: Iterable[Violation] = ()) -> M:
    """The body as `model`. Raises Refusal that lists every problem.

    `known` are problems found before.
    """
    problems = list(known)
    try:
        found = model.model_validate(body)
    except pydantic.ValidationError as error:
        problems += map(_violation, error.errors(include_url=False, include_context=False))
    if problems:
        first = problems[0]
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        message = f"{first.field}: {first.description}{more}"
        raise Refusal(400, first.reason, message, param=first.field, violations=problems)
    return found


def _violation(error: Mapping[str, Any]) -> Violation:
    first, *rest = error["loc"]
    path = str(first)
    for part in rest:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("<"):  # The tag of a union's member.
            path += f".{part}"
    kind = "missing" if error["input"] is None else error["type"]
    return Violation(path, error["msg"], _REASONS.get(kind, "FIELD_INVALID"))
