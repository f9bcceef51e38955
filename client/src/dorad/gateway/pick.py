"""Runs the endpoint picker until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import dorad.aio
from dorad._access import check_encrypted
from dorad._channel import PROBE_SECONDS
from dorad.fleet.stores import store_of
from dorad.gateway.external_processing_pb2_grpc import add_ExternalProcessorServicer_to_server
from dorad.gateway.listener import (
    HttpServer,
    add_grpc_port,
    address_of,
    check_listener,
    listen,
)
from dorad.gateway.metrics import TYPE, PickerMetrics
from dorad.gateway.picker import EndpointPicker, Endpoints

_SERVICES = ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
"""Names by which its health is asked for, beside "liveness"."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of `doractl endpoint-picker`."""

    targets: tuple[str, ...]
    """Servers of one model. (): the members of `fleet`."""
    listen: str
    """host:port. Port 0: a free port."""
    endpoint_port: int
    """Of the pods' HTTP listeners."""
    fleet: str = ""
    """A fleet's manifest, as `dorad.fleet.stores.SPELLINGS` says."""
    metrics_listen: str = ""
    """host:port of the metrics, over HTTP in plain text. "": none."""
    token: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    allow_insecure: bool = False
    drain_seconds: float = 30.0
    """Time for requests in flight after a signal."""
    body_bytes: int = 4 << 20


async def pick(settings: Settings, ready: Callable[[str, str], None]) -> None:
    """Serves until SIGTERM or SIGINT. A second signal ends requests in flight.

    `ready` is called once with the addresses of the metrics ("": none) and of the picker. Raises
    ValueError for settings that do not fit, and OSError.
    """
    if bool(settings.fleet) == bool(settings.targets):
        raise ValueError("give either --fleet or --target")
    check_listener(settings.listen, settings.tls_cert, settings.tls_key, settings.allow_insecure)
    if settings.metrics_listen:
        check_listener(settings.metrics_listen, "", "", settings.allow_insecure)

    def connect(target: str) -> dorad.aio.Client:
        check_encrypted(target, settings.token, settings.allow_insecure)
        return dorad.aio.Client(
            target, retry_for=0, timeout=PROBE_SECONDS, token=settings.token or None
        )

    store = store_of(settings.fleet) if settings.fleet else None
    endpoints = Endpoints(settings.targets, connect, store, settings.endpoint_port)
    try:
        await endpoints.follow()
        await endpoints.look()
        watching = asyncio.create_task(endpoints.watch())
        try:
            await _serve(settings, endpoints, ready)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
    finally:
        await endpoints.close()


@contextlib.asynccontextmanager
async def _metrics_server(address: str, metrics: PickerMetrics) -> AsyncIterator[str]:
    """Its address; "": none."""
    if not address:
        yield ""
        return

    async def page(request: Request) -> Response:
        return Response(metrics.text(), media_type=TYPE)

    with listen(address) as listener:
        server = HttpServer(Starlette(routes=[Route("/metrics", page, methods=["GET"])]))
        task = await server.begin(listener)
        try:
            yield address_of(listener)
        finally:
            server.should_exit = True
            await task


async def _serve(
    settings: Settings, endpoints: Endpoints, ready: Callable[[str, str], None]
) -> None:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    picker = EndpointPicker(endpoints, settings.body_bytes)
    add_ExternalProcessorServicer_to_server(picker, server)
    status = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    for service in (*_SERVICES, "liveness"):
        await status.set(service, health_pb2.HealthCheckResponse.SERVING)
    address = add_grpc_port(server, settings.listen, settings.tls_cert, settings.tls_key)
    signals = asyncio.Queue[None]()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, None)
    await server.start()
    async with _metrics_server(settings.metrics_listen, picker.metrics) as metrics_address:
        ready(metrics_address, address)
        await signals.get()
        for service in _SERVICES:
            await status.set(service, health_pb2.HealthCheckResponse.NOT_SERVING)
        stopping = asyncio.ensure_future(server.stop(settings.drain_seconds))
        again = asyncio.ensure_future(signals.get())
        await asyncio.wait({stopping, again}, return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
        if not stopping.done():
            await server.stop(None)
        await stopping
