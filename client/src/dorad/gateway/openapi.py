"""The OpenAPI 3.1 document of the gateway, from its routes and the models of what they read and
write."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pydantic
from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute, Route

import dorad
from dorad.gateway.http import Endpoint

_COMPONENT = "#/components/schemas/{model}"


class OpenAIError(pydantic.BaseModel):
    message: str
    type: str
    param: str | None
    code: str
    """A stable reason."""
    violations: list[dict[str, str]] = []


class Error(pydantic.BaseModel):
    error: OpenAIError | str
    """Below /v2 a string, "REASON: message"."""


def document(routes: Iterable[BaseRoute]) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    models: set[type[pydantic.BaseModel]] = {Error}
    for route in routes:
        assert isinstance(route, Route) and isinstance(route.endpoint, Endpoint)
        endpoint = route.endpoint
        models |= {m for m in (endpoint.body, endpoint.answers, endpoint.events) if m is not None}
        path = route.path.replace(":path", "")
        for method in (route.methods or set()) - {"HEAD"}:
            paths.setdefault(path, {})[method.lower()] = _operation(route, route.endpoint)
    _, schemas = models_json_schema([(m, "validation") for m in models], ref_template=_COMPONENT)
    return {
        "openapi": "3.1.0",
        "info": {"title": "dorad gateway", "version": dorad.__version__},
        "security": [{}, {"token": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": schemas["$defs"],
        },
    }


def _operation(route: Route, endpoint: Endpoint) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if endpoint.answers is not None:
        content = _json(endpoint.answers)
    elif endpoint.events is None:
        content = {"application/json": {"schema": {"type": "object"}}}
    if endpoint.events is not None:
        # Each `data:` is one; completions and chats end with `data: [DONE]`.
        content["text/event-stream"] = _json(endpoint.events)["application/json"]
    error = {"description": "A refusal or a failure.", "content": _json(Error)}
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in route.param_convertors
        ],
    }
    if endpoint.body is not None:
        required = endpoint.body_required
        operation["requestBody"] = {"required": required, "content": _json(endpoint.body)}
    good = {"description": endpoint.summary, "content": content}
    operation["responses"] = {"200": good, "4XX": error, "5XX": error}
    return operation


def _json(model: type[pydantic.BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _COMPONENT.format(model=model.__name__)}}}
