"""Options of the commands that serve: the gateway and the endpoint picker."""

from __future__ import annotations

from typing import Annotated

import typer

from dorad.fleet.stores import SPELLINGS
from dorad.gateway.log import LogFormat

FleetOption = Annotated[
    str,
    typer.Option(
        "--fleet",
        envvar="DORAD_FLEET",
        help=f"Manifest of a fleet, whose members are the servers: {SPELLINGS}.",
    ),
]
TlsCertOption = Annotated[
    str, typer.Option("--tls-cert", help="Certificate (PEM): serve with TLS.")
]
TlsKeyOption = Annotated[
    str, typer.Option("--tls-key", help="Private key of the certificate (PEM).")
]
DrainOption = Annotated[
    float,
    typer.Option(
        "--drain", help="Seconds that requests in flight may still run after SIGTERM.", min=1
    ),
]
LogFormatOption = Annotated[
    LogFormat,
    typer.Option("--log-format", help="json: one object a line; text: for terminals."),
]
