"""The client's connection settings: channel options, deadlines and keepalive, with reasons."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from typing import Any

from dorad._arguments import as_count, as_seconds
from dorad.errors import Cancelled

DEFAULT_PORT = 50051
DEFAULT_TARGET = f"127.0.0.1:{DEFAULT_PORT}"
MAX_MESSAGE_BYTES = 256 << 20
CHUNK_BYTES = 1 << 20
PROBE_SECONDS = 5.0
"""Time limit of a question whether a server is well."""


def channel_options(keepalive: float, extra: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Options of the channel; `extra` wins."""
    if keepalive < 30:
        raise ValueError(
            f"keepalive must be at least 30 s (servers close on more), not {keepalive}"
        )
    options: dict[str, Any] = {
        "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
        "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
        # A FINAL answer may take minutes; pings distinguish a slow server from a dead host.
        "grpc.keepalive_time_ms": 2**31 - 1 if math.isinf(keepalive) else int(keepalive * 1000),
        "grpc.keepalive_timeout_ms": 20_000,
        "grpc.keepalive_permit_without_calls": 0,
        "grpc.http2.max_pings_without_data": 0,
        "grpc.initial_reconnect_backoff_ms": 200,
        "grpc.max_reconnect_backoff_ms": 1_000,  # A server that returns is soon found.
        "grpc.min_reconnect_backoff_ms": 5_000,  # The time for a connection and its handshakes.
        "grpc.enable_retries": 0,  # _retry.py does it.
        "grpc.primary_user_agent": "dorad-python",
    }
    options.update(extra)
    return list(options.items())


def deadline(timeout: float | None, default: float | None) -> float | None:
    """Seconds for gRPC. None means the client's default, math.inf none at all."""
    chosen = default if timeout is None else timeout
    if chosen is None or math.isinf(as_seconds(chosen, "timeout")):
        return None
    if not chosen > 0:
        raise ValueError(f"timeout must be positive, not {chosen}")
    return chosen


class Budget:
    """A timeout that several calls share.

    Args:
      timeout: seconds; math.inf: no limit; None: each call has its client's default.
    """

    def __init__(self, timeout: float | None) -> None:
        deadline(timeout, None)  # Checks the value.
        self.seconds = timeout
        self._end = None if timeout is None else time.monotonic() + timeout

    @property
    def left(self) -> float | None:
        """Seconds for the next call, or None."""
        return None if self._end is None else max(0.001, self._end - time.monotonic())

    def outlasts(self, seconds: float) -> bool:
        """Whether time is left after `seconds`."""
        return self._end is None or time.monotonic() + seconds < self._end


class Process:
    """The process of a connection. Its children by fork() have only a broken half: gRPC's threads
    are missing, and a call may hang."""

    def __init__(self) -> None:
        self._id = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this is a child."""
        return os.getpid() != self._id

    def check(self) -> None:
        if self.forked:
            raise RuntimeError(
                "this client or pool was made before fork(), which its connections do not survive:"
                " make one in each process, or send it there pickled"
            )


def closed() -> Cancelled:
    """The error of a call ended by the client's close."""
    return Cancelled("the client was closed", code="CANCELLED")


def check_concurrency(concurrency: int) -> int:
    if as_count(concurrency, "concurrency") < 1:
        raise ValueError(f"concurrency must be at least 1, not {concurrency}")
    return concurrency
