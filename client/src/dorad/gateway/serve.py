"""Runs the gateway until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import uvicorn

import dorad
import dorad.aio
from dorad import types as t
from dorad._access import check_encrypted
from dorad.fleet.stores import store_of
from dorad.gateway.admission import OPEN_TO_ALL
from dorad.gateway.app import application
from dorad.gateway.core import Gateway, Limits
from dorad.gateway.listener import (
    HttpServer,
    add_grpc_port,
    address_of,
    check_listener,
    is_exposed,
    listen,
)
from dorad.gateway.oip_grpc import OpenInferenceService
from dorad.gateway.open_inference_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from dorad.gateway.rl.options import RlOptions
from dorad.gateway.servers import Servers
from dorad.text import ModelText


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of `doractl gateway`."""

    targets: tuple[str, ...]
    """Servers of one model. (): the members of `fleet`."""
    listen: str
    """host:port. Port 0: a free port."""
    fleet: str = ""
    """A fleet's manifest, as `dorad.fleet.stores.SPELLINGS` says."""
    admin_targets: tuple[str, ...] = ()
    """Addresses of the adapter and control services, one for each target. (): the targets."""
    grpc_listen: str = ""
    """host:port for the Open Inference Protocol over gRPC. "": none."""
    token: str = ""
    """Token for the gateway's own calls. Callers send theirs."""
    tls_cert: str = ""
    tls_key: str = ""
    allow_insecure: bool = False
    drain_seconds: float = 30.0
    """Time for requests in flight after a signal."""
    limits: Limits = field(default_factory=Limits)
    logprobs_mode: t.LogprobMode = "raw"
    """Of requests that do not choose one."""
    served_model_name: str = ""
    """The base model's id. "": the name of its folder."""
    image_roots: tuple[Path, ...] = ()
    """Files of images are read below these folders only."""
    rl: RlOptions | None = None
    """None: without the routes of RL libraries."""

    @property
    def admin_of(self) -> dict[str, str]:
        """The address of the adapter and control services of each target."""
        return dict(zip(self.targets, self.admin_targets or self.targets, strict=True))


def check(settings: Settings) -> None:
    """Raises ValueError for an address that would carry tokens and texts in plain text.

    This includes the servers' addresses, because the gateway forwards its callers' tokens.
    """
    if len(settings.admin_targets) not in (0, len(settings.targets)):
        raise ValueError(
            f"{len(settings.admin_targets)} --admin-target for {len(settings.targets)} --target: "
            "give one for each, in their order"
        )
    if settings.fleet and settings.targets:
        raise ValueError("--fleet has the servers: no --target")
    if settings.fleet and settings.rl is not None:
        raise ValueError("--rl loads adapters itself: with --fleet a trainer publishes them")
    for target in (*settings.targets, *settings.admin_targets):
        check_encrypted(target, settings.token, settings.allow_insecure)
    for address in _listeners(settings):
        check_listener(address, settings.tls_cert, settings.tls_key, settings.allow_insecure)


def _listeners(settings: Settings) -> list[str]:
    return [address for address in (settings.listen, settings.grpc_listen) if address]


async def serve(
    settings: Settings, text: ModelText | None, ready: Callable[[str, str], None]
) -> None:
    """Serves until SIGTERM or SIGINT. A second signal ends requests in flight, also over gRPC.

    `ready` is called once with the addresses of the HTTP and the gRPC listener ("": none).

    Raises ValueError like `check`, for a target without GetInfo, and for a server that accepts
    calls without a token while other hosts can reach the gateway.
    """
    check(settings)
    async with _serving(settings) as servers:
        exposed = any(map(is_exposed, _listeners(settings))) and not settings.allow_insecure
        gateway = Gateway(
            servers,
            text,
            settings.limits,
            exposed=exposed,
            logprobs_mode=settings.logprobs_mode,
            served_model_name=settings.served_model_name,
            image_roots=settings.image_roots,
        )
        # A server that is not up yet is checked before each caller instead.
        if exposed and await gateway.admission.is_open():
            raise ValueError(OPEN_TO_ALL)
        with listen(settings.listen) as listener:
            server = HttpServer(
                application(gateway),
                timeout_keep_alive=75,
                timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
                ssl_certfile=settings.tls_cert or None,
                ssl_keyfile=settings.tls_key or None,
            )
            connections = server.server_state.connections
            gateway.metrics.connections.set_function(lambda: len(connections))
            async with _grpc_server(gateway, settings) as (grpc_server, grpc_address):
                _on_signals(server, grpc_server, settings.drain_seconds)
                task = await server.begin(listener)
                if server.started:
                    ready(address_of(listener), grpc_address)
                await task


@contextlib.asynccontextmanager
async def _serving(settings: Settings) -> AsyncIterator[Servers]:
    """The servers, with their states kept up to date."""
    admin_of = settings.admin_of

    def connect(target: str) -> dorad.aio.Client:
        if settings.fleet:  # Members were not known to `check`.
            check_encrypted(target, settings.token, settings.allow_insecure)
        admin = admin_of.get(target, target)
        # No retries on one server: the caller gets the retry hint and decides.
        return dorad.aio.Client(
            target,
            admin_target=None if admin == target else admin,
            retry_for=0,
            timeout=settings.limits.timeout,
            token=settings.token or None,
        )

    store = store_of(settings.fleet) if settings.fleet else None
    servers = Servers(settings.targets, connect, settings.rl, store)
    try:
        await servers.follow()
        await _check_servers(servers, admin_of)
        await servers.look()
        watching = asyncio.create_task(servers.watch())
        try:
            yield servers
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
    finally:
        await servers.close()


async def _check_servers(servers: Servers, admin_of: dict[str, str]) -> None:
    """Raises ValueError if an address has no GetInfo, or servers hold different models.

    A server that is down may start later.
    """
    models = dict[str, str]()
    answers = await servers.each(lambda client: client.info(timeout=5))
    for target, answer in answers.items():
        if isinstance(answer, dorad.DoradError):
            # Refusals by the server have a reason; those of a proxy have none.
            if answer.code in ("UNIMPLEMENTED", "PERMISSION_DENIED") and not answer.reason:
                raise ValueError(
                    f"{admin_of.get(target, target)} does not offer GetInfo ({answer}): give the "
                    "server's own address, or its server.admin_listen as --admin-target"
                )
        else:
            models.setdefault(answer.model.digest, f"{answer.model.name} at {target}")
    if len(models) > 1:
        raise ValueError(f"the servers hold different models: {', '.join(models.values())}")


@contextlib.asynccontextmanager
async def _grpc_server(
    gateway: Gateway, settings: Settings
) -> AsyncIterator[tuple[grpc.aio.Server | None, str]]:
    """The gRPC server and its address, or (None, ""). Calls in flight may finish on exit."""
    if not settings.grpc_listen:
        yield None, ""
        return
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", settings.limits.body_bytes),
            ("grpc.so_reuseport", 0),  # Two gateways must not share a port.
        ]
    )
    add_GRPCInferenceServiceServicer_to_server(OpenInferenceService(gateway), server)
    address = add_grpc_port(server, settings.grpc_listen, settings.tls_cert, settings.tls_key)
    await server.start()
    try:
        yield server, address
    finally:
        await server.stop(settings.drain_seconds)
        await _end_calls()


async def _end_calls() -> None:
    """Waits for the tasks of gRPC's calls. `stop` does not: the loop's end would cancel them, and
    gRPC would print a traceback for each."""
    tasks = asyncio.all_tasks()
    calls = [t for t in tasks if getattr(t.get_coro(), "__qualname__", "") == "_schedule_rpc_coro"]
    if calls:
        await asyncio.wait(calls, timeout=5)


def _on_signals(
    server: uvicorn.Server, grpc_server: grpc.aio.Server | None, drain_seconds: float
) -> None:
    """Stops both at the same time, so that neither accepts requests while the other drains."""
    loop = asyncio.get_running_loop()
    stops = set[asyncio.Task[None]]()  # The loop keeps only weak references to tasks.

    def end() -> None:
        again = server.should_exit
        server.should_exit, server.force_exit = True, again
        if grpc_server is not None:
            stops.add(loop.create_task(grpc_server.stop(None if again else drain_seconds)))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
