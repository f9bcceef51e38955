"""Checks a JSON body against the subset of JSON Schema that the OpenAPI document shows.

One table a request (`Schema.properties`) is both: what is checked and what is documented.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from dorad.errors import Violation
from dorad.gateway.errors import Refusal

Schema = Mapping[str, Any]

_NAMES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
}

UINT32 = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}
TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}}

_LARGEST = sys.float_info.max  # Beyond it, integers are no double and literals infinite.
_SURROGATE = re.compile(r"\\u[dD]")


def parse(body: bytes) -> dict[str, Any]:
    """A JSON object in UTF-8.

    Raises Refusal, also for NaN and infinities, which are no JSON, and for half a surrogate pair,
    which is no text.
    """

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is no JSON")

    try:
        text = body.decode("utf-8-sig")
        value = json.loads(text, parse_constant=refuse)
        if _SURROGATE.search(text):  # Nothing else can have brought one.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Refusal(400, "BODY_NOT_JSON", f"the body is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise Refusal(400, "BODY_NOT_JSON", "the body is no JSON object")
    return value


def checked(
    body: Mapping[str, Any], schema: Schema, known: Iterable[Violation] = ()
) -> dict[str, Any]:
    """The body's fields without those that are null. Raises Refusal that lists every problem.

    `known` are problems that the caller has found before.
    """
    given = {name: value for name, value in body.items() if value is not None}
    problems = list(known)
    _object(given, schema, "", problems)
    if problems:
        first = problems[0]
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        message = f"{first.field}: {first.description}{more}"
        raise Refusal(400, first.reason, message, param=first.field, violations=problems)
    return given


def _object(value: Mapping[str, Any], schema: Schema, path: str, out: list[Violation]) -> None:
    properties = schema.get("properties")
    for name in schema.get("required", ()):
        if value.get(name) is None:
            out.append(Violation(path + name, "is missing", "FIELD_MISSING"))
    if properties is None:
        return
    for name, item in value.items():
        if name in properties:
            if item is not None:
                _check(item, properties[name], path + name, out)
        elif schema.get("additionalProperties") is False:
            out.append(Violation(path + name, "is not known here", "FIELD_UNKNOWN"))


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _NAMES[name])


def _resembles(value: Any, schema: Schema) -> bool:
    """Of the right type, as far as a list's first entry tells."""
    if not _is(value, schema["type"]):
        return False
    items = schema.get("items")
    return not isinstance(value, list) or not value or not items or _resembles(value[0], items)


def _check(value: Any, schema: Schema, path: str, out: list[Violation]) -> None:
    def wrong(what: str) -> None:
        out.append(Violation(path, what, "FIELD_INVALID"))

    if "anyOf" in schema:
        tries: list[list[Violation]] = []
        for option in schema["anyOf"]:
            tries.append([])
            _check(value, option, path, tries[-1])
            if not tries[-1]:
                return
        # What the nearest form has to say, if there is one.
        near = [t for t, o in zip(tries, schema["anyOf"], strict=True) if _resembles(value, o)]
        if near:
            out += near[0]
        else:
            wrong(f"must be {_describe(schema)}")
        return
    kind = schema.get("type")
    if kind is not None and not _is(value, kind):
        wrong(f"must be {_describe(schema)}")
        return
    if "enum" in schema and value not in schema["enum"]:
        wrong(f"must be one of {', '.join(json.dumps(v) for v in schema['enum'])}")
    elif kind in ("integer", "number"):
        low, high = schema.get("minimum", -_LARGEST), schema.get("maximum", _LARGEST)
        if not low <= value <= high:
            wrong(f"must be in [{low}, {high}]")
    elif kind in ("string", "array"):
        unit = "characters" if kind == "string" else "entries"
        low, high = schema.get(f"min{_LENGTH[kind]}", 0), schema.get(f"max{_LENGTH[kind]}")
        if len(value) < low:
            wrong(f"must have at least {low} {unit}")
        elif high is not None and len(value) > high:
            wrong(f"must have at most {high} {unit}")
        elif kind == "array" and "items" in schema:
            _items(value, schema["items"], path, out)
    elif kind == "object":
        _object(value, schema, f"{path}.", out)


_LENGTH = {"string": "Length", "array": "Items"}


def _items(values: list[Any], schema: Schema, path: str, out: list[Violation]) -> None:
    if schema.get("type") == "integer":  # Long lists of token ids: not one call for each.
        low, high = schema.get("minimum", -_LARGEST), schema.get("maximum", _LARGEST)
        if all(type(v) is int for v in values) and (
            not values or (min(values) >= low and max(values) <= high)
        ):
            return
    before = len(out)
    for i, value in enumerate(values):
        _check(value, schema, f"{path}[{i}]", out)
        if len(out) > before:
            return  # One bad entry of a list is enough.


def _describe(schema: Schema) -> str:
    if "anyOf" in schema:
        return " or ".join(_describe(option) for option in schema["anyOf"])
    kind = str(schema["type"])
    words = ("an " if kind[0] in "aio" else "a ") + kind
    return f"{words} of {_plural(schema['items'])}" if "items" in schema else words


def _plural(schema: Schema) -> str:
    if "anyOf" in schema:
        return " or ".join(_plural(option) for option in schema["anyOf"])
    kind = f"{schema['type']}s"
    return f"{kind} of {_plural(schema['items'])}" if "items" in schema else kind
