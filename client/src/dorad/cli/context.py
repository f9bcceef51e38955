"""`doractl context list | show | use | set | delete`: named servers in the user's file."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from dorad.cli import contexts
from dorad.cli.common import Group, Output, OutputOption, console, errors, table
from dorad.cli.contexts import Context, Contexts

app = typer.Typer(cls=Group, no_args_is_help=True)

NameArgument = Annotated[
    str,
    typer.Argument(
        help="Name of the context.", show_default=False, autocompletion=contexts.complete
    ),
]


def _token(context: Context) -> str:
    """Where the token comes from; never the token."""
    if context.token_file:
        return f"file {context.token_file}"
    return f"variable {context.token_env}" if context.token_env else ""


@app.command("list")
def list_contexts(output: OutputOption = Output.TABLE) -> None:
    """List the contexts."""
    known = Contexts.load()
    rows = [
        {"name": name, "current": name == known.current} | context.given()
        for name, context in sorted(known.contexts.items())
    ]

    def print_rows() -> None:
        if not rows:
            errors().print(f"no contexts in {contexts.path()}; make one with doractl context set")
            return
        made = table("CURRENT", "NAME", "TARGET", "ADMIN TARGET", "TLS", "TOKEN")
        for name, context in sorted(known.contexts.items()):
            made.add_row(
                "*" if name == known.current else "",
                name,
                context.target,
                context.admin_target,
                "yes" if context.ca_file or context.cert_file else "",
                _token(context),
            )
        console().print(made)

    output.show(rows, print_rows)


@app.command()
def show(
    name: Annotated[
        str,
        typer.Argument(help="Default: the current one.", autocompletion=contexts.complete),
    ] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Show one context. A token is named, not shown."""
    known = Contexts.load()
    name = name or known.current
    if not name:
        raise typer.BadParameter("there is no current context; name one", param_hint="NAME")
    values = {"name": name, "current": name == known.current} | known[name].given()

    def print_values() -> None:
        made = table("NAME", name)
        for key, value in known[name].given().items():
            made.add_row(key.replace("_", " "), value)
        console().print(made)

    output.show(values, print_values)


@app.command()
def use(
    name: Annotated[
        str,
        typer.Argument(help="Without a name: no context.", autocompletion=contexts.complete),
    ] = "",
) -> None:
    """Make a context the current one: commands use it without --context."""
    known = Contexts.load()
    if name:
        target = known[name].target
    known.current = name
    known.save()
    print(f"{name} is the current context: {target}" if name else "no context is current")
    for variable in ("DORAD_TARGET", "DORAD_CONTEXT"):
        if os.environ.get(variable):
            errors().print(f"{variable} is set and counts more than the current context")


@app.command("set")
def set_context(
    name: NameArgument,
    target: Annotated[
        str | None, typer.Option("--target", "-t", help="host:port or unix:PATH.")
    ] = None,
    admin_target: Annotated[
        str | None, typer.Option(help="Address of the adapter and control services.")
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(help="URL of the server's /metrics, for top.")
    ] = None,
    ca_file: Annotated[str | None, typer.Option(help="TLS: certificates to trust (PEM).")] = None,
    cert_file: Annotated[str | None, typer.Option(help="TLS: the client's certificate.")] = None,
    key_file: Annotated[str | None, typer.Option(help="TLS: its private key.")] = None,
    token_file: Annotated[str | None, typer.Option(help="File that holds the token.")] = None,
    token_env: Annotated[
        str | None, typer.Option(help="Name of the variable that holds the token.")
    ] = None,
    current: Annotated[bool, typer.Option("--use", help="Make it the current one.")] = False,
) -> None:
    """Make or change a context. An empty value removes it: --token-file ''."""
    known = Contexts.load()
    contexts.check_name(name)
    given = {
        "target": target,
        "admin_target": admin_target,
        "metrics": metrics,
        "ca_file": _absolute(ca_file),
        "cert_file": _absolute(cert_file),
        "key_file": _absolute(key_file),
        "token_file": _absolute(token_file),
        "token_env": token_env,
    }
    changes = {key: value for key, value in given.items() if value is not None}
    made = name not in known.contexts
    if made and not target:
        raise typer.BadParameter("a new context needs a server", param_hint="--target")
    context = replace(known.contexts.get(name, Context()), **changes)
    context.check()
    known.contexts[name] = context
    if current:
        known.current = name
    known.save()
    print(f"{name} is {'made' if made else 'changed'}: {context.target}")
    for key in (*contexts.TLS, "token_file"):
        file = changes.get(key)
        if file and not Path(file).is_file():
            errors().print(f"there is no file {file} yet")


def _absolute(file: str | None) -> str | None:
    """A command may run in any folder."""
    return str(Path(file).expanduser().absolute()) if file else file


@app.command()
def delete(name: NameArgument) -> None:
    """Delete a context. Its files stay."""
    known = Contexts.load()
    known.remove(name)
    known.save()
    print(f"{name} is deleted")
