"""`doractl token`: creates a token and its entry for the server's tokens file."""

from __future__ import annotations

import enum
import hashlib
import json
import secrets
from typing import Annotated

import typer

from dorad.cli.common import Output, OutputOption

BYTES = 32
"""Random bytes of a token. Enough entropy for an unsalted SHA-256."""


class Role(enum.StrEnum):
    """Services that a token may use."""

    INFER = "infer"
    PUBLISH = "publish"
    ADMIN = "admin"


def token(
    name: Annotated[str, typer.Argument(help="Name of the holder, for logs.", show_default=False)],
    tenant: Annotated[str, typer.Option("--tenant", help="Tenant of the requests.")] = "default",
    role: Annotated[
        list[Role] | None, typer.Option("--role", "-r", help="Role; repeatable.  [default: infer]")
    ] = None,
    adapters: Annotated[
        str, typer.Option("--adapters", help="Prefix of the adapter names that it may use.")
    ] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Create a token. The server stores its SHA-256 only, so give the token to its holder now."""
    made = f"dorad_{secrets.token_urlsafe(BYTES)}"
    entry: dict[str, object] = {
        "name": name,
        "tenant": tenant,
        "sha256": hashlib.sha256(made.encode()).hexdigest(),
        "roles": [item.value for item in role or [Role.INFER]],
    }
    if adapters:
        entry["adapters"] = adapters
    told = (
        f"DORAD_TOKEN={made}\n\nAn entry of `tokens` in the server's security.tokens_file:\n\n"
        f"  - {json.dumps(entry)}"  # JSON is YAML.
    )
    output.show({"token": made, "entry": entry}, lambda: print(told))
