"""`doractl gateway`: OpenAI's API and the Open Inference Protocol."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from dorad.cli.common import VersionOption
from dorad.cli.server import Server, on_server


@on_server(retries=False)
def gateway(
    server: Server,
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
    version: VersionOption = False,
) -> None:
    """Serve OpenAI's HTTP API and the Open Inference Protocol in front of a server."""
    try:
        from dorad.gateway.core import Limits
        from dorad.gateway.serve import Settings, serve
        from dorad.text import ModelText
    except ImportError as error:
        raise ImportError(f"{error}: pip install 'dorad[cli,gateway]'") from error
    settings = Settings(
        target=server.target,
        admin_target=server.admin_target,
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
            timeout=server.timeout,
        ),
    )
    text = None if tokenizer is None else ModelText(tokenizer)
    if text is not None:
        text.check_chat_template()

    def ready(http: str, grpc: str) -> None:
        print(f"dorad gateway ready http={http}" + (f" grpc={grpc}" if grpc else ""), flush=True)

    asyncio.run(serve(settings, text, ready))
