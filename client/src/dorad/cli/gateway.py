"""`doractl gateway`: OpenAI's API and the Open Inference Protocol."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from dorad._channel import DEFAULT_TARGET
from dorad.cli.common import DEFAULT_TIMEOUT, TimeoutOption, VersionOption
from dorad.cli.server import ContextOption, of_context
from dorad.gateway.log import LogFormat, LogLevel, start_logging


def gateway(
    ctx: typer.Context,
    listen: Annotated[
        str, typer.Option("--listen", help="HTTP: host:port. Port 0: a free port.")
    ] = "127.0.0.1:8000",
    grpc_listen: Annotated[
        str, typer.Option(help="Also serve the Open Inference Protocol over gRPC: host:port.")
    ] = "",
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            envvar="DORAD_MODEL",
            help="Model folder with tokenizer and chat template. Default: token ids only.",
        ),
    ] = None,
    token: Annotated[
        str,
        typer.Option(
            help="Token of the gateway's own calls. Callers send theirs.",
            show_default="DORAD_TOKEN, or that of the context",
        ),
    ] = "",
    tls_cert: Annotated[str, typer.Option(help="Certificate (PEM): serve HTTPS.")] = "",
    tls_key: Annotated[str, typer.Option(help="Private key of the certificate (PEM).")] = "",
    allow_insecure: Annotated[
        bool,
        typer.Option(
            "--allow-insecure",
            help="Allow listening beyond the loopback without TLS, or for a server without tokens.",
        ),
    ] = False,
    max_body_bytes: Annotated[
        int, typer.Option(help="Maximum body size of a request.", min=1024)
    ] = 4 << 20,
    max_choices: Annotated[
        int, typer.Option(help="Maximum of prompts times n in a request.", min=1)
    ] = 128,
    max_requests: Annotated[
        int, typer.Option(help="Maximum number of requests in flight; more get 429.", min=1)
    ] = 1024,
    drain: Annotated[
        float,
        typer.Option(help="Seconds that requests in flight may still run after SIGTERM.", min=1),
    ] = 30.0,
    log_level: Annotated[
        LogLevel, typer.Option(help="info has a line for each request.")
    ] = LogLevel.INFO,
    log_format: Annotated[
        LogFormat, typer.Option(help="json: one object a line; text: for terminals.")
    ] = LogFormat.JSON,
    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            "-t",
            envvar="DORAD_TARGET",
            show_default=DEFAULT_TARGET,
            help="Server: host:port or unix:PATH. Several times: servers of one model.",
        ),
    ] = None,
    admin_target: Annotated[
        list[str] | None,
        typer.Option(
            "--admin-target",
            envvar="DORAD_ADMIN_TARGET",
            help="Address of the adapter and control services, if it differs from the target. "
            "One for each target, in their order.",
        ),
    ] = None,
    context: ContextOption = "",
    timeout: TimeoutOption = DEFAULT_TIMEOUT,
    version: VersionOption = False,
) -> None:
    """Serve OpenAI's HTTP API and the Open Inference Protocol in front of servers."""
    try:
        from dorad.gateway.core import Limits
        from dorad.gateway.serve import Settings, serve
        from dorad.text import ModelText
    except ImportError as error:
        raise ImportError(f"{error}: pip install 'dorad[cli,gateway]'") from error
    given = {"context": context, "target": target, "admin_target": admin_target}
    of_one = of_context(ctx, given)
    if "target" in of_one:
        target = [of_one["target"]]
    if of_one.get("admin_target"):
        admin_target = [of_one["admin_target"]]
    start_logging(log_level, log_format)
    settings = Settings(
        targets=tuple(target or [DEFAULT_TARGET]),
        admin_targets=tuple(admin_target or []),
        listen=listen,
        grpc_listen=grpc_listen,
        token=token or os.environ.get("DORAD_TOKEN", ""),
        tls_cert=tls_cert,
        tls_key=tls_key,
        allow_insecure=allow_insecure,
        drain_seconds=drain,
        limits=Limits(
            body_bytes=max_body_bytes,
            choices=max_choices,
            requests=max_requests,
            timeout=timeout,
        ),
    )
    text = None if tokenizer is None else ModelText(tokenizer)
    if text is not None:
        text.check_chat_template()

    def ready(http: str, grpc: str) -> None:
        print(f"dorad gateway ready http={http}" + (f" grpc={grpc}" if grpc else ""), flush=True)

    asyncio.run(serve(settings, text, ready))
