"""How the client connects: channel options, retries and keepalive, and why they are so."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from dorad.errors import DoradError

DEFAULT_TARGET = "127.0.0.1:50051"
MAX_MESSAGE_BYTES = 256 << 20
CHUNK_BYTES = 1 << 20

# Calls that may be sent again without a second effect. gRPC itself never retries once the first
# message of the answer has arrived, so a Generate stream is never spliced from two runs.
# Activate and Retire are left out: UNAVAILABLE can hide a success. Publish goes on by itself.
_RETRYABLE = [
    ("dorad.v1.InferenceService", ("Generate", "Score", "Abort")),
    ("dorad.v1.AdapterService", ("Get", "GetUpload", "List", "Watch")),
    ("dorad.v1.ControlService", ("GetInfo", "Pause", "Resume", "Yield", "EndYield")),
]


def service_config() -> str:
    """gRPC service config. A server's grpc-retry-pushback-ms overrides the backoff."""
    names = [{"service": s, "method": m} for s, methods in _RETRYABLE for m in methods]
    return json.dumps(
        {
            "methodConfig": [
                {
                    "name": names,
                    "retryPolicy": {
                        "maxAttempts": 5,
                        "initialBackoff": "0.1s",
                        "maxBackoff": "5s",
                        "backoffMultiplier": 2,
                        "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
                    },
                }
            ],
            # When many calls fail, stop adding retries to the load.
            "retryThrottling": {"maxTokens": 100, "tokenRatio": 0.5},
        }
    )


def channel_options(
    keepalive: float, retries: bool, extra: Sequence[tuple[str, Any]]
) -> list[tuple[str, Any]]:
    """Options of the channel; `extra` wins."""
    if keepalive < 30:
        raise ValueError(
            f"keepalive must be at least 30 s (servers close on more), not {keepalive}"
        )
    options: dict[str, Any] = {
        "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
        "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
        # A FINAL answer may be silent for minutes; pings tell a slow server from a dead host.
        "grpc.keepalive_time_ms": 2**31 - 1 if math.isinf(keepalive) else int(keepalive * 1000),
        "grpc.keepalive_timeout_ms": 20_000,
        "grpc.keepalive_permit_without_calls": 0,
        "grpc.http2.max_pings_without_data": 0,
        "grpc.initial_reconnect_backoff_ms": 200,
        "grpc.min_reconnect_backoff_ms": 200,
        "grpc.max_reconnect_backoff_ms": 5_000,
        "grpc.enable_retries": 1 if retries else 0,
        "grpc.primary_user_agent": "dorad-python",
    }
    if retries:
        options["grpc.service_config"] = service_config()
    options.update(extra)
    return list(options.items())


def deadline(timeout: float | None, default: float | None) -> float | None:
    """Seconds for gRPC. None means the client's default, math.inf none at all."""
    chosen = default if timeout is None else timeout
    if chosen is None or math.isinf(chosen):
        return None
    if not chosen > 0:
        raise ValueError(f"timeout must be positive, not {chosen}")
    return chosen


def overload_delay(error: DoradError, attempt: int) -> float:
    """Seconds to wait before sending a refused request again: the server's hint, else backoff."""
    if error.retry_after is not None:
        return max(error.retry_after, 0.01)
    return min(5.0, 0.1 * 2.0 ** min(attempt, 10))


def check_concurrency(concurrency: int) -> int:
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, not {concurrency}")
    return concurrency
