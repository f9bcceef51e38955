"""The gateway's HTTP application: all routes, and the errors for unknown routes."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dorad.gateway import metrics, oip_http, openai, openapi, tokenization
from dorad.gateway.callers import Caller
from dorad.gateway.core import Gateway
from dorad.gateway.errors import Refusal
from dorad.gateway.http import Endpoint, answer
from dorad.gateway.rl import routes as rl_routes


async def _health(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """Whether the server takes requests."""
    if await gateway.healthy():
        return answer({"status": "ok"})
    raise Refusal(503, "SERVER_NOT_READY", "the server is not serving", retry_after=1)


async def _metrics(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """The gateway's own metrics, for Prometheus."""
    return Response(gateway.metrics.text(), media_type=metrics.TYPE)


async def _openapi(gateway: Gateway, request: Request, caller: Caller) -> Response:
    """This document."""
    return answer(openapi.document(request.app.routes))


async def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reasons: Mapping[int, str] = {404: "ROUTE_NOT_FOUND", 405: "METHOD_NOT_ALLOWED"}
    message = f"{request.method} {request.url.path}: {error.detail}"
    refusal = Refusal(error.status_code, reasons.get(error.status_code, "HTTP_ERROR"), message)
    oip = f"{request.url.path}/".startswith("/v2/")
    body = oip_http.error_body(refusal) if oip else refusal.body()
    return answer(body, refusal.status, dict(error.headers or {}))


def application(gateway: Gateway) -> Starlette:
    def endpoint(name: str, handler: object) -> Endpoint:
        return Endpoint(gateway, name, handler, Refusal.body, public=True)  # type: ignore[arg-type]

    return Starlette(
        routes=[
            *openai.routes(gateway),
            *tokenization.routes(gateway),
            *oip_http.routes(gateway),
            *([] if gateway.servers.rl is None else rl_routes.routes(gateway)),
            Route("/health", endpoint("health", _health), methods=["GET"]),
            Route("/metrics", endpoint("metrics", _metrics), methods=["GET"]),
            Route("/openapi.json", endpoint("openapi", _openapi), methods=["GET"]),
        ],
        exception_handlers={HTTPException: _unknown},
    )
