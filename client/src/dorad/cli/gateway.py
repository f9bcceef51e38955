"""`doractl gateway`: OpenAI's API and the Open Inference Protocol."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import os
from pathlib import Path
from typing import Annotated

import typer

from dorad._channel import DEFAULT_TARGET
from dorad.cli.common import DEFAULT_TIMEOUT, TimeoutOption, VersionOption
from dorad.cli.generate import Logprobs
from dorad.cli.server import ContextOption, of_context
from dorad.cli.serving import (
    DrainOption,
    FleetOption,
    LogFormatOption,
    TlsCertOption,
    TlsKeyOption,
)
from dorad.gateway.log import LogFormat, LogLevel, start_logging


class InFlightPolicy(enum.StrEnum):
    """What requests in flight do when the active version of their adapter moves."""

    PIN = "pin"
    SWITCH_KEEP_KV = "switch_keep_kv"
    SWITCH_RECOMPUTE = "switch_recompute"


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
    tls_cert: TlsCertOption = "",
    tls_key: TlsKeyOption = "",
    allow_insecure: Annotated[
        bool,
        typer.Option(
            "--allow-insecure",
            help="Allow listening beyond the loopback without TLS, or for a server without tokens.",
        ),
    ] = False,
    served_model_name: Annotated[
        str,
        typer.Option(help="Id of the base model.", show_default="the name of the model's folder"),
    ] = "",
    logprobs_mode: Annotated[
        Logprobs,
        typer.Option(
            help="Log-probabilities of requests that do not choose: of the model (raw), or of the "
            "distribution that is sampled from (processed), or after the temperature (scaled).",
        ),
    ] = Logprobs.RAW,
    image_root: Annotated[
        list[Path] | None,
        typer.Option(
            help="Chats may name pictures below this folder by file: URLs. Several times.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    rl: Annotated[
        bool,
        typer.Option(
            "--rl", help="Also serve the routes of vLLM that RL libraries call. Larger limits."
        ),
    ] = False,
    adapter_root: Annotated[
        list[Path] | None,
        typer.Option(
            help="With --rl: adapters are loaded from folders below this one. Several times.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    in_flight_policy: Annotated[
        InFlightPolicy,
        typer.Option(
            help="With --rl: what requests in flight do when their adapter is loaded again.",
        ),
    ] = InFlightPolicy.SWITCH_KEEP_KV,
    max_body_bytes: Annotated[
        int | None,
        typer.Option(
            help="Maximum body size of a request.",
            min=1024,
            show_default="4 MiB, with --rl 256 MiB",
        ),
    ] = None,
    max_choices: Annotated[
        int | None,
        typer.Option(
            help="Maximum of prompts times n in a request.",
            min=1,
            show_default="128, with --rl 16384",
        ),
    ] = None,
    max_requests: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of requests in flight; more get 429.",
            min=1,
            show_default="1024, with --rl 16384",
        ),
    ] = None,
    drain: DrainOption = 30.0,
    log_level: Annotated[
        LogLevel, typer.Option(help="info has a line for each request.")
    ] = LogLevel.INFO,
    log_format: LogFormatOption = LogFormat.JSON,
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
    fleet: FleetOption = "",
    context: ContextOption = "",
    timeout: TimeoutOption = DEFAULT_TIMEOUT,
    version: VersionOption = False,
) -> None:
    """Serve OpenAI's HTTP API and the Open Inference Protocol in front of servers."""
    try:
        from dorad.gateway.core import RL_LIMITS, Limits
        from dorad.gateway.rl.options import RlOptions
        from dorad.gateway.serve import Settings, serve
        from dorad.text import ModelText
    except ImportError as error:
        raise ImportError(f"{error}: pip install 'dorad[cli,gateway]'") from error
    given = {"context": context, "target": target, "admin_target": admin_target}
    of_one = of_context(ctx, given)
    if "target" in of_one and not fleet:
        target = [of_one["target"]]
    if of_one.get("admin_target") and not fleet:
        admin_target = [of_one["admin_target"]]
    if image_root and tokenizer is None:
        raise ValueError("--image-root needs --tokenizer")
    if adapter_root and not rl:
        raise ValueError("--adapter-root needs --rl")
    most = {"body_bytes": max_body_bytes, "choices": max_choices, "requests": max_requests}
    start_logging(log_level, log_format)
    settings = Settings(
        targets=tuple(target or ([] if fleet else [DEFAULT_TARGET])),
        fleet=fleet,
        admin_targets=tuple(admin_target or []),
        listen=listen,
        grpc_listen=grpc_listen,
        token=token or os.environ.get("DORAD_TOKEN", ""),
        tls_cert=tls_cert,
        tls_key=tls_key,
        allow_insecure=allow_insecure,
        drain_seconds=drain,
        limits=dataclasses.replace(
            RL_LIMITS if rl else Limits(), timeout=timeout, **{k: v for k, v in most.items() if v}
        ),
        logprobs_mode=logprobs_mode.value,
        served_model_name=served_model_name,
        image_roots=tuple(image_root or []),
        rl=RlOptions(tuple(adapter_root or []), in_flight_policy.value) if rl else None,
    )
    text = None if tokenizer is None else ModelText(tokenizer)
    if text is not None:
        text.check_chat_template()

    def ready(http: str, grpc: str) -> None:
        print(f"dorad gateway ready http={http}" + (f" grpc={grpc}" if grpc else ""), flush=True)

    asyncio.run(serve(settings, text, ready))
