"""`doractl token`: makes a token and the entry of the server's tokens file that goes with it."""

from __future__ import annotations

import enum
import hashlib
import json
import secrets
from typing import Annotated

import typer

from dorad.cli.common import Output, OutputOption, print_json

BYTES = 32
"""Of randomness: nobody guesses it, so a plain SHA-256 hides it."""


class Role(enum.StrEnum):
    """What a token opens."""

    INFER = "infer"
    PUBLISH = "publish"
    ADMIN = "admin"


def token(
    name: Annotated[str, typer.Argument(help="Who gets it, for logs.", show_default=False)],
    tenant: Annotated[str, typer.Option("--tenant", help="Whose requests these are.")] = "default",
    role: Annotated[
        list[Role] | None, typer.Option("--role", "-r", help="May be repeated.  [default: infer]")
    ] = None,
    adapters: Annotated[
        str, typer.Option("--adapters", help="What the names of its adapters begin with.")
    ] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Makes a token. The server keeps its SHA-256 only: give the token to its holder now."""
    made = f"dorad_{secrets.token_urlsafe(BYTES)}"
    entry: dict[str, object] = {
        "name": name,
        "tenant": tenant,
        "sha256": hashlib.sha256(made.encode()).hexdigest(),
        "roles": [item.value for item in role or [Role.INFER]],
    }
    if adapters:
        entry["adapters"] = adapters
    if output is Output.JSON:
        print_json({"token": made, "entry": entry})
        return
    print(f"DORAD_TOKEN={made}\n\nAn entry of `tokens` in the server's security.tokens_file:\n")
    print(f"  - {json.dumps(entry)}")  # JSON is YAML.
