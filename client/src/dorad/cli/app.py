"""The commands of `doractl`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from dorad.cli import adapters, gateway, generate, operate, score, token, top
from dorad.cli.common import Group, Output, share_options

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Talk to a dorad server: one base model, many DoRA adapters.",
    epilog="Credentials: DORAD_TOKEN, DORAD_CA_FILE, DORAD_CERT_FILE, DORAD_KEY_FILE. "
    "Exit codes: 0 success, 64 usage, 69 server unavailable, 130 interrupted, "
    "1 any other failure.",
)


def _version(value: bool) -> None:
    if value:
        import dorad

        print(f"doractl {dorad.__version__}")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
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
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    given = {
        "target": target or None,
        "output": output.value if output else None,
        "retry_for": retry_for,
    }
    values = {name: value for name, value in given.items() if value is not None}
    for name in values:  # What is given on the command line counts more than the environment.
        os.environ.pop(f"DORAD_{name.upper()}", None)
    ctx.default_map = share_options(ctx.command, values)


app.command("generate")(generate.generate)
app.command("score")(score.score)
app.add_typer(adapters.app, name="adapters", help="Publish, inspect and retire adapters.")
app.command("gateway")(gateway.gateway)
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
