"""Listeners of HTTP and gRPC, and where they may be."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import uvicorn
from starlette.applications import Starlette

from dorad._access import is_loopback


def split_address(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address!r} is not HOST:PORT, for example 127.0.0.1:8000")
    return host.removeprefix("[").removesuffix("]"), int(port)


def listen(address: str) -> socket.socket:
    """A listener at HOST:PORT. Raises OSError."""
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=1024)
    # Connections inherit it. asyncio does not set it for them, because their socket.proto is 0;
    # without it the second write of an answer waits for the client's delayed ACK, 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def address_of(listener: socket.socket) -> str:
    """HOST:PORT."""
    host, port, *_ = listener.getsockname()
    return f"[{host}]:{port}" if listener.family == socket.AF_INET6 else f"{host}:{port}"


class HttpServer(uvicorn.Server):
    """An application's HTTP server. `should_exit` ends it; signals are its program's."""

    def __init__(self, application: Starlette, **options: Any) -> None:
        super().__init__(
            uvicorn.Config(
                application,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                **options,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def begin(self, listener: socket.socket) -> asyncio.Task[None]:
        """Serves until the task's end. Returns once it takes requests."""
        task = asyncio.create_task(self.serve(sockets=[listener]))
        while not self.started and not task.done():
            await asyncio.sleep(0.01)
        return task


def is_exposed(address: str) -> bool:
    """Whether other hosts can reach a listening address."""
    return not is_loopback(split_address(address)[0])


def check_listener(address: str, tls_cert: str, tls_key: str, allow_insecure: bool) -> None:
    """Raises ValueError for plain text that other hosts can reach, and for half a key pair."""
    if bool(tls_cert) != bool(tls_key):
        raise ValueError("--tls-cert and --tls-key must be given together")
    if is_exposed(address) and not tls_cert and not allow_insecure:
        raise ValueError(
            f"{address} is not on the loopback: give --tls-cert and --tls-key, put a "
            "proxy in front, or pass --allow-insecure"
        )


def add_grpc_port(server: grpc.aio.Server, address: str, tls_cert: str, tls_key: str) -> str:
    """A listener of a gRPC server at HOST:PORT. Returns its address. Raises OSError."""
    try:
        if tls_cert:
            pair = (Path(tls_key).read_bytes(), Path(tls_cert).read_bytes())
            port = server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        else:
            port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from None
    return f"{address.rpartition(':')[0]}:{port}"
