"""The commands of `doractl`."""

from __future__ import annotations

from typing import Annotated

import typer

from dorad.cli import (
    adapters,
    context,
    contexts,
    endpoint_picker,
    fleet,
    gateway,
    generate,
    operate,
    score,
    token,
    top,
)
from dorad.cli.common import Output, Root, VersionOption

app = typer.Typer(
    cls=Root,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Talk to a dorad server: one base model, many DoRA adapters.",
    epilog="Credentials: a context, or DORAD_TOKEN, DORAD_CA_FILE, DORAD_CERT_FILE, "
    "DORAD_KEY_FILE. Exit codes: 0 success, 64 usage, 69 server unavailable, 130 interrupted, "
    "1 any other failure.",
)


@app.callback()
def root(
    context: Annotated[
        str,
        typer.Option(
            "--context",
            help="Default for all subcommands.",
            show_default=False,
            autocompletion=contexts.complete,
        ),
    ] = "",
    target: Annotated[
        str, typer.Option("--target", "-t", help="Default for all subcommands.", show_default=False)
    ] = "",
    output: Annotated[
        Output | None, typer.Option("--output", "-o", help="Default for all subcommands.")
    ] = None,
    retry_for: Annotated[
        float | None,
        typer.Option("--retry-for", help="Default for all subcommands.", show_default=False),
    ] = None,
    version: VersionOption = False,
) -> None:
    """The options are read by `Root`, which a shell's completion uses, too."""


app.command("generate")(generate.generate)
app.command("score")(score.score)
app.add_typer(adapters.app, name="adapters", help="Publish, inspect and retire adapters.")
app.add_typer(context.app, name="context", help="Name servers and their credentials.")
app.add_typer(fleet.app, name="fleet", help="Look at a fleet, add and remove members.")
app.command("gateway")(gateway.gateway)
app.command("endpoint-picker")(endpoint_picker.endpoint_picker)
app.command("token")(token.token)
app.command("info")(operate.info)
app.command("top")(top.top)
app.command("health")(operate.health)
app.command("pause")(operate.pause)
app.command("resume")(operate.resume)
app.command("sleep")(operate.sleep)
app.command("wake")(operate.wake)
app.command("limit-gpu-share")(operate.limit_gpu_share)
app.command("end-gpu-share-limit")(operate.end_gpu_share_limit)
app.command("abort")(operate.abort)
