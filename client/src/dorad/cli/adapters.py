"""`doractl adapters check | list | show | publish | activate | rollback | retire | watch`."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

import dorad
from dorad.cli.check import check
from dorad.cli.common import (
    Group,
    Output,
    OutputOption,
    console,
    errors,
    size,
    table,
)
from dorad.cli.completion import (
    LIVE_STATES,
    complete_name,
    complete_reference,
    complete_version,
)
from dorad.cli.server import Server, on_server

app = typer.Typer(cls=Group, no_args_is_help=True)
app.command("check")(check)

RefArgument = Annotated[
    str,
    typer.Argument(metavar="NAME@VERSION", show_default=False, autocompletion=complete_version),
]
GenerationOption = Annotated[
    int | None,
    typer.Option(help="Fail if the registry is not at this generation (compare-and-set)."),
]


def _rank(version: dorad.AdapterVersion) -> str:
    low, high = version.min_rank, version.max_rank
    return str(high) if low == high else f"{low}-{high}"


def versions_table(versions: Sequence[dorad.AdapterVersion]) -> Table:
    """One row for each version, for `adapters list` and `top`."""
    made = table(
        "NAME", ">VERSION", "ACTIVE", "DURABLE", "STATE", "KIND", ">RANK", ">SIZE", ">LEASES",
        "DIGEST",
    )  # fmt: skip
    for v in versions:
        made.add_row(
            v.name,
            str(v.version),
            "yes" if v.active else "",
            "yes" if v.durable else "",
            v.state,
            v.kind,
            _rank(v),
            size(v.resident_bytes),
            str(v.leases),
            v.digest[:12],
        )
    return made


def _weights(version: dorad.AdapterVersion) -> str:
    """Location of the weights: "resident", "in host memory" or "away"."""
    if version.state not in ("ready", "retiring"):
        return ""
    places = ["resident"] if version.resident else []
    if version.in_host_memory:
        places.append("in host memory")
    return ", ".join(places) or "away"


def _print_one(version: dorad.AdapterVersion) -> None:
    timing = version.timing
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    rows = {
        "version": version.label + (" (active)" if version.active else ""),
        "digest": version.digest,
        "state": version.state,
        "failure": version.failure,
        "kind": f"{version.kind}, rank {_rank(version)}, {version.num_modules} modules",
        "size": f"{size(version.resident_bytes)}, {version.num_parameters / 1e6:.2f} M parameters",
        "leases": str(version.leases),
        "loaded in": f"{timing.total:.3f} s (read {timing.read:.3f}, validate "
        f"{timing.validate:.3f}, copy {timing.copy:.3f}, norms {timing.norms:.3f})",
        "weights": _weights(version),
        "durable": "yes" if version.durable else "no",
        "created": version.create_time.isoformat() if version.create_time else "",
        "tags": ", ".join(f"{k}={v}" for k, v in sorted(version.tags.items())),
        "generation": str(version.generation),
    }
    for name, value in rows.items():
        if value:
            grid.add_row(name, value)
    console().print(grid)


@app.command("list")
@on_server()
def list_adapters(
    server: Server,
    name: Annotated[
        str, typer.Argument(help="Only versions of this name.", autocompletion=complete_name)
    ] = "",
    everything: Annotated[
        bool, typer.Option("--all", help="Also failed versions and those that are gone.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the versions the server holds."""
    with server.connect() as client:
        found = client.adapters(name or None)
    shown = found if everything else [v for v in found if v.state in LIVE_STATES]
    if shown or output is not Output.TABLE:
        output.show(shown, lambda: console().print(versions_table(shown)))
    else:
        errors().print("no adapters" + (f" named {name}" if name else ""))
    if len(found) > len(shown):
        hidden = len(found) - len(shown)
        errors().print(f"not shown: {hidden} failed or gone (--all)")


@app.command()
@on_server()
def show(
    server: Server,
    ref: Annotated[
        str,
        typer.Argument(
            metavar="NAME[@VERSION]", show_default=False, autocompletion=complete_reference
        ),
    ],
    output: OutputOption = Output.TABLE,
) -> None:
    """Show one version (without @VERSION: the active one)."""
    with server.connect() as client:
        found = client.adapter(ref)
    output.show(found, lambda: _print_one(found))


def _tags(pairs: list[str]) -> dict[str, str]:
    tags = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint="--tag")
        tags[key] = value
    return tags


@app.command()
@on_server()
def publish(
    server: Server,
    name: Annotated[
        str, typer.Argument(help="Adapter name.", show_default=False, autocompletion=complete_name)
    ],
    path: Annotated[Path, typer.Argument(help="PEFT folder.", show_default=False)],
    activate: Annotated[bool, typer.Option(help="Make it the active version.")] = True,
    version: Annotated[int | None, typer.Option(help="Default: the next one.", min=1)] = None,
    server_side: Annotated[
        bool,
        typer.Option(
            "--server-side", help="PATH is on the server's host: absolute, below an allowed root."
        ),
    ] = False,
    expected_generation: GenerationOption = None,
    durable: Annotated[
        bool, typer.Option("--durable", help="Keep the version when the server restarts.")
    ] = False,
    tag: Annotated[list[str] | None, typer.Option(help="KEY=VALUE, repeatable.")] = None,
    keep_last: Annotated[
        int | None,
        typer.Option(
            help="Retire all but the newest N ready versions and the active one. 0: none.",
            min=0,
        ),
    ] = None,
    pinned: Annotated[
        bool, typer.Option("--pinned", help="Never evict its weights from memory.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Upload a PEFT folder as a new version."""
    bar = Progress(
        TextColumn("uploading"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=errors(),
        transient=True,
        disable=server_side or not sys.stderr.isatty(),
    )
    with bar, server.connect() as client:
        task = bar.add_task("upload", total=None)
        done = client.publish(
            name,
            path=path,
            activate=activate,
            version=version,
            server_side=server_side,
            expected_generation=expected_generation,
            durable=durable,
            tags=_tags(tag or []),
            keep_last=keep_last,
            pinned=pinned,
            progress=lambda sent, total: bar.update(task, completed=sent, total=total),
        )
    output.show(done, lambda: _print_one(done))


@app.command()
@on_server()
def activate(
    server: Server,
    ref: RefArgument,
    expected_generation: GenerationOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Make a version active: requests for NAME then use it."""
    with server.connect() as client:
        _show_activation(client.activate(ref, expected_generation=expected_generation), output)


def _show_activation(done: dorad.Activation, output: Output) -> None:
    before = f"version {done.previous_version}" if done.previous_version else "none"
    told = f"{done.adapter.label} is active (before: {before}; generation {done.generation})"
    output.show(done, lambda: print(told))


def _version_below_active(name: str, versions: Sequence[dorad.AdapterVersion]) -> int:
    active = next((v.version for v in versions if v.active), None)
    if active is None:
        message = (
            f"{name!r} has no active version"
            if versions
            else (f"there is no adapter named {name!r}")
        )
        raise dorad.NotFound(message, code="NOT_FOUND")
    ready = [v.version for v in versions if v.version < active and v.state == "ready"]
    if not ready:
        message = f"no version of {name!r} below the active one ({active}) is ready"
        raise dorad.NotFound(message, code="NOT_FOUND")
    return max(ready)


@app.command()
@on_server()
def rollback(
    server: Server,
    name: Annotated[
        str, typer.Argument(help="Adapter name.", show_default=False, autocompletion=complete_name)
    ],
    to: Annotated[
        int | None,
        typer.Option(
            help="Version. Default: the newest ready version below the active one.", min=1
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Activate an earlier version. Fails if the registry changes at the same time."""
    with server.connect() as client:
        versions = client.adapters(name)
        number = _version_below_active(name, versions) if to is None else to
        # The generation of this list. Without versions the server reports the error.
        generation = versions[0].generation if versions else None
        _show_activation(client.activate(name, number, expected_generation=generation), output)


@app.command()
@on_server()
def retire(
    server: Server,
    ref: RefArgument,
    force: Annotated[bool, typer.Option("--force", help="Abort the requests that use it.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Retire a version now. Its memory is freed when its requests have ended."""
    with server.connect() as client:
        gone = client.retire(ref, force=force)
    told = f"{gone.label} is {gone.state}; {gone.leases} requests still use it"
    output.show(gone, lambda: print(told))


def _print_event(event: dorad.WatchEvent) -> None:
    version = event.adapter
    note = f"  {json.dumps(version.failure)}" if version.failure else ""
    print(f"{event.generation:>6}  {event.type:<9}  {version.label}{note}", flush=True)


@app.command()
@on_server(timeout=None, retries=False)
def watch(
    server: Server,
    from_generation: Annotated[
        int | None,
        typer.Option("--from", help="Start after this generation. Default: only new events."),
    ] = None,
    count: Annotated[int, typer.Option(help="Stop after this many events. 0: never.", min=0)] = 0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print registry events as they happen. JSON: one line for each event; YAML: a document."""
    with server.connect() as client, client.watch(from_generation) as events:
        for number, event in enumerate(events, 1):
            output.show_event(event, functools.partial(_print_event, event))
            if number == count:
                break
