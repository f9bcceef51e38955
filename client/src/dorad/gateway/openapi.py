"""The OpenAPI 3.1 document of the gateway, from the tables that requests are checked with."""

from __future__ import annotations

from typing import Any

import dorad
from dorad.gateway import fields

_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string", "description": "A stable reason."},
                "violations": {"type": "array", "items": {"type": "object"}},
            },
        }
    },
}


def _json(schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _answers(description: str, *, streams: bool = False) -> dict[str, Any]:
    good = _json({"type": "object"}, description)
    if streams:
        good["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    error = _json({"$ref": "#/components/schemas/Error"}, "A refusal or a failure.")
    return {"200": good, "4XX": error, "5XX": error}


def _get(summary: str, *parameters: str) -> dict[str, Any]:
    found: dict[str, Any] = {"summary": summary, "responses": _answers(summary)}
    if parameters:
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in parameters
        ]
    return {"get": found}


def _post(summary: str, request: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{request}"}}}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": content},
            "responses": _answers(summary, streams=True),
        }
    }


def document() -> dict[str, Any]:
    return {
        "openapi": "3.1.0",
        "info": {"title": "dorad gateway", "version": dorad.__version__},
        "security": [{}, {"token": []}],
        "paths": {
            "/v1/models": _get("The base model and the adapters with an active version."),
            "/v1/models/{model}": _get("One of them, or name@version.", "model"),
            "/v1/completions": _post("Completes prompts.", "CompletionRequest"),
            "/v1/chat/completions": _post("Answers a conversation.", "ChatRequest"),
            "/health": _get("Whether the server takes requests."),
            "/metrics": _get("The gateway's own metrics, for Prometheus."),
            "/openapi.json": _get("This document."),
        },
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {
                "CompletionRequest": fields.COMPLETION,
                "ChatRequest": fields.CHAT,
                "Error": _ERROR,
            },
        },
    }
