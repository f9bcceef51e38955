"""The OpenAPI 3.1 document of the gateway, from the tables that requests are checked with."""

from __future__ import annotations

from typing import Any

import dorad
from dorad.gateway import fields, oip_http

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


def _of_models() -> dict[str, Any]:
    """The Open Inference Protocol's routes of one model, and of one version of it."""
    found = {}
    for start, names in (
        ("/v2/models/{model}", ["model"]),
        ("/v2/models/{model}/versions/{version}", ["model", "version"]),
    ):
        found[start] = _get("A model's tensors and versions.", *names)
        found[f"{start}/ready"] = _get("Whether requests for it are taken.", *names)
        for end, request in (
            ("infer", "InferRequest"),
            ("generate", "GenerateRequest"),
            ("generate_stream", "GenerateRequest"),
        ):
            path = _post("Tokens for a prompt.", request, *names)
            found[f"{start}/{end}"] = path
    return found


def _parameters(names: tuple[str, ...]) -> list[dict[str, Any]]:
    schema = {"type": "string"}
    return [{"name": n, "in": "path", "required": True, "schema": schema} for n in names]


def _get(summary: str, *parameters: str) -> dict[str, Any]:
    found: dict[str, Any] = {"summary": summary, "responses": _answers(summary)}
    return {"get": {**found, "parameters": _parameters(parameters)}}


def _post(summary: str, request: str, *parameters: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{request}"}}}
    return {
        "post": {
            "summary": summary,
            "parameters": _parameters(parameters),
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
            "/v2": _get("The server's name, version and extensions."),
            "/v2/health/live": _get("Whether the gateway runs."),
            "/v2/health/ready": _get("Whether the server takes requests."),
            "/v2/repository/index": _post("All models and versions.", "IndexRequest"),
            **_of_models(),
            "/health": _get("Whether the server takes requests."),
            "/metrics": _get("The gateway's own metrics, for Prometheus."),
            "/openapi.json": _get("This document."),
        },
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {
                "CompletionRequest": fields.COMPLETION,
                "ChatRequest": fields.CHAT,
                "InferRequest": oip_http.INFER,
                "GenerateRequest": oip_http.GENERATE,
                "IndexRequest": oip_http.INDEX,
                "Error": _ERROR,
            },
        },
    }
