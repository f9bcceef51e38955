"""The gateway's metrics, in a separate registry."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator

import grpc
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

import dorad
from dorad.gateway.servers import Servers

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """See docs/guides/gateway.md."""

    def __init__(self, servers: Servers) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(_ServerStates(servers))
        Gauge(
            "dorad_gateway_build_info",
            "Always 1.",
            ["version", "python", "grpc"],
            registry=self.registry,
        ).labels(dorad.__version__, platform.python_version(), grpc.__version__).set(1)
        self.connections = Gauge(
            "dorad_gateway_connections",
            "Open HTTP connections.",
            registry=self.registry,
        )
        self.requests = Counter(
            "dorad_gateway_requests_total",
            "Finished requests, by endpoint and HTTP status or gRPC code.",
            ["endpoint", "code"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "dorad_gateway_request_seconds",
            "Duration of a request, to the end of its answer.",
            ["endpoint"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.first_token_seconds = Histogram(
            "dorad_gateway_time_to_first_token_seconds",
            "Time from the body of a streaming request to its first event.",
            ["endpoint"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "dorad_gateway_requests_in_flight",
            "Requests in flight.",
            registry=self.registry,
        )
        self.tokens = Counter(
            "dorad_gateway_tokens_total",
            "Tokens of finished requests.",
            ["kind"],
            registry=self.registry,
        )

    def count_tokens(self, prompt: int, completion: int) -> None:
        self.tokens.labels("prompt").inc(prompt)
        self.tokens.labels("completion").inc(completion)

    def first_token(self, endpoint: str) -> Callable[[], None]:
        """Starts a timer for the first token. Call the result when the token arrives."""
        began = time.monotonic()
        seconds = self.first_token_seconds.labels(endpoint)
        return lambda: seconds.observe(time.monotonic() - began)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _ServerStates(Collector):
    """Whether each server takes requests. Read as the metrics are."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers

    def collect(self) -> Iterator[GaugeMetricFamily]:
        found = GaugeMetricFamily(
            "dorad_gateway_server_ready", "1 while the server gets requests.", labels=["server"]
        )
        for target, state in self._servers.states.items():
            found.add_metric([target], float(state == "ready"))
        yield found
