"""The metrics of the gateway and of the endpoint picker, each in a registry of its own."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping

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
from dorad._pool_server import Server
from dorad.fleet.watched import WatchedServers

TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of the page."""

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


_OfServer = Mapping[str, tuple[str, Callable[[Server], float]]]
"""Gauges of each server: name, help and value."""


class ProgramMetrics:
    """What both have: the process, its version, and whether each server gets requests."""

    def __init__(self, program: str, servers: WatchedServers, of_server: _OfServer) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        ready = "1 while the server gets requests."
        gauges = {"server_ready": (ready, lambda server: server.state == "ready"), **of_server}
        self.registry.register(_Servers(program, servers, gauges))
        Gauge(
            f"{program}_build_info",
            "Always 1.",
            ["version", "python", "grpc"],
            registry=self.registry,
        ).labels(dorad.__version__, platform.python_version(), grpc.__version__).set(1)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class Metrics(ProgramMetrics):
    """The gateway's. See docs/guides/gateway.md."""

    def __init__(self, servers: WatchedServers) -> None:
        super().__init__("dorad_gateway", servers, {})
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


class PickerMetrics(ProgramMetrics):
    """The endpoint picker's. See docs/guides/fleet.md."""

    def __init__(self, servers: WatchedServers) -> None:
        of_server: _OfServer = {
            "server_load": (
                "Sequences and waiting requests, as the server said last, with the picks since.",
                lambda server: server.load,
            ),
            "server_queued_requests": (
                "Requests that wait, as the server has told last.",
                lambda server: server.queued,
            ),
            "server_kv_use": (
                "Share of the KV cache in use, as the server has told last.",
                lambda server: server.kv_use,
            ),
            "server_versions_behind": (
                "Versions of the fleet that the server lacks.",
                lambda server: server.behind,
            ),
        }
        super().__init__("dorad_picker", servers, of_server)
        self.requests = Counter(
            "dorad_picker_requests_total",
            "Requests, by what became of them: chosen, no_server, body_too_long, ended.",
            ["outcome"],
            registry=self.registry,
        )
        self.picks = Counter(
            "dorad_picker_picks_total",
            "Chosen servers, by reason: home, version, full, bound, least.",
            ["reason"],
            registry=self.registry,
        )
        Gauge(
            "dorad_picker_requests_in_flight",
            "Requests whose pod is chosen and whose streams have not ended.",
            registry=self.registry,
        ).set_function(lambda: sum(server.outstanding for server in servers.servers))
        Gauge(
            "dorad_picker_look_age_seconds",
            "Time since the servers were asked for their states.",
            registry=self.registry,
        ).set_function(lambda: servers.look_age)


class _Servers(Collector):
    """Gauges of each server. Read as the metrics are."""

    def __init__(self, program: str, servers: WatchedServers, gauges: _OfServer) -> None:
        self._program = program
        self._servers = servers
        self._gauges = gauges

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, (text, value) in self._gauges.items():
            found = GaugeMetricFamily(f"{self._program}_{name}", text, labels=["server"])
            for server in self._servers.servers:
                found.add_metric([server.target], float(value(server)))
            yield found
