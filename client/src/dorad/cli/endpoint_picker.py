"""`doractl endpoint-picker`: the pod for each request of a gateway of Kubernetes."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated

import typer

from dorad.cli.common import VersionOption
from dorad.cli.serving import (
    DrainOption,
    FleetOption,
    LogFormatOption,
    TlsCertOption,
    TlsKeyOption,
)
from dorad.gateway.log import LogFormat, LogLevel, start_logging


def endpoint_picker(
    listen: Annotated[
        str, typer.Option("--listen", help="gRPC: host:port. Port 0: a free port.")
    ] = "127.0.0.1:9002",
    metrics_listen: Annotated[
        str,
        typer.Option(
            help='HTTP for /metrics: host:port. Port 0: a free port. "": none.', show_default="none"
        ),
    ] = "",
    endpoint_port: Annotated[
        int,
        typer.Option(help="Port of the pods' gateways, as in the InferencePool.", min=1, max=65535),
    ] = 8000,
    fleet: FleetOption = "",
    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target", "-t", help="Server: host:port, in place of --fleet. Several times."
        ),
    ] = None,
    token: Annotated[
        str,
        typer.Option(help="Token for the questions to the servers.", show_default="DORAD_TOKEN"),
    ] = "",
    tls_cert: TlsCertOption = "",
    tls_key: TlsKeyOption = "",
    allow_insecure: Annotated[
        bool,
        typer.Option(
            "--allow-insecure",
            help="Allow listening beyond the loopback, and asking other hosts, without TLS.",
        ),
    ] = False,
    max_body_bytes: Annotated[
        int, typer.Option(help="Maximum body size of a request; longer ones get 413.", min=1024)
    ] = 4 << 20,
    drain: DrainOption = 30.0,
    log_level: Annotated[LogLevel, typer.Option()] = LogLevel.INFO,
    log_format: LogFormatOption = LogFormat.JSON,
    version: VersionOption = False,
) -> None:
    """Choose pods for the Gateway API Inference Extension, over Envoy's ext_proc.

    A request goes to the server that has its model's adapter and the beginning of its prompt.
    """
    from dorad.gateway.pick import Settings, pick  # Other commands need no protocol of proxies.

    start_logging(log_level, log_format)
    settings = Settings(
        targets=tuple(target or []),
        listen=listen,
        metrics_listen=metrics_listen,
        endpoint_port=endpoint_port,
        fleet=fleet,
        token=token or os.environ.get("DORAD_TOKEN", ""),
        tls_cert=tls_cert,
        tls_key=tls_key,
        allow_insecure=allow_insecure,
        drain_seconds=drain,
        body_bytes=max_body_bytes,
    )

    def ready(metrics: str, address: str) -> None:
        http = f" http={metrics}" if metrics else ""
        print(f"dorad endpoint-picker ready{http} grpc={address}", flush=True)

    asyncio.run(pick(settings, ready))
