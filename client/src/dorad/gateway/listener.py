"""The HTTP listener's socket."""

from __future__ import annotations

import socket


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
