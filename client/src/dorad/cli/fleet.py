"""`doractl fleet show | join | leave | proxy`: the members and versions of a fleet's manifest.

`show` looks and changes nothing. The processes that hold the fleet bring a new member to its
versions.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

import dorad
import dorad.aio
from dorad._channel import PROBE_SECONDS
from dorad._pool_server import gather
from dorad.cli.common import (
    DEFAULT_TIMEOUT,
    Group,
    Output,
    OutputOption,
    TimeoutOption,
    console,
    size,
    table,
)
from dorad.fleet import manifest as m
from dorad.fleet.coordinator import LEASE_SECONDS
from dorad.fleet.manifest_store import ManifestFile, ManifestStore, change
from dorad.fleet.proxy import ProxiedServers, keep
from dorad.fleet.stores import SPELLINGS, store_of
from dorad.gateway.log import LogFormat, LogLevel, start_logging

app = typer.Typer(cls=Group, no_args_is_help=True)

ManifestArgument = Annotated[
    str,
    typer.Argument(metavar="MANIFEST", help=f"{SPELLINGS}.".capitalize(), show_default=False),
]
MemberArgument = Annotated[
    str, typer.Argument(metavar="TARGET", help="A server's host:port.", show_default=False)
]


@dataclass
class Member:
    """A member, and how far it is."""

    target: str
    live: bool
    """Its lease has not ended: a publish waits for it."""
    state: str
    """"ready", "behind" (another version is active, or none) or "away"."""
    versions: dict[str, int]
    """The active version by adapter."""
    behind: list[str]
    """The fleet's versions that are not active there."""
    lag: int | None
    """By how many version numbers it is behind, over all adapters; unknown while it is away."""
    sent: int | None
    """Bytes of adapters to other servers since its start; unknown while it is away."""
    received: int | None
    """Likewise from other servers."""


@dataclass
class Version:
    """An adapter's version of the fleet, and the one on its way."""

    name: str
    committed: int
    digest: str
    bytes: int
    prepared: int
    coordinator: str
    left: bool
    """Its coordinator's lease has ended: another process of the fleet finishes or undoes it."""


@dataclass
class Report:
    generation: int
    members: list[Member]
    adapters: list[Version]


def _store(manifest: str) -> ManifestStore:
    store = store_of(manifest)
    if isinstance(store, ManifestFile) and not Path(manifest).is_file():
        raise FileNotFoundError(2, os.strerror(2), manifest)
    return store


@dataclass
class _Answers:
    """Of a member that is there."""

    active: dict[str, dorad.AdapterVersion]
    info: dorad.ServerInfo


async def _ask(target: str) -> _Answers:
    async with dorad.aio.Client(target, timeout=PROBE_SECONDS, retry_for=0) as client:
        active = {version.name: version for version in await client.adapters() if version.active}
        return _Answers(active, await client.info())


def _member(
    target: str,
    manifest: m.Manifest,
    now: float,
    found: Mapping[str, _Answers],
) -> Member:
    there = found.get(target)
    active = there.active if there else {}
    committed = manifest.committed()
    behind = manifest.behind({(v.name, v.version, v.digest) for v in active.values()})
    state = "away" if there is None else "behind" if behind else "ready"
    versions = {name: version.version for name, version in active.items()}
    missing = (max(release.version - versions.get(n, 0), 0) for n, release in committed.items())
    return Member(
        target=target,
        live=target in manifest.live(now),
        state=state,
        versions=versions,
        behind=behind,
        lag=sum(missing) if there else None,
        sent=there.info.peer_bytes_sent if there else None,
        received=there.info.peer_bytes_received if there else None,
    )


async def _report(store: ManifestStore) -> Report:
    manifest = await store.read()
    found, _ = await gather({target: _ask(target) for target in manifest.members})
    now = time.time()
    adapters = [
        Version(
            name,
            adapter.committed.version if adapter.committed else 0,
            adapter.committed.digest if adapter.committed else "",
            adapter.committed.files.size if adapter.committed else 0,
            adapter.prepared.release.version if adapter.prepared else 0,
            adapter.prepared.coordinator if adapter.prepared else "",
            adapter.prepared is not None and adapter.prepared.until <= now,
        )
        for name, adapter in sorted(manifest.adapters.items())
    ]
    members = [_member(target, manifest, now, found) for target in manifest.members]
    return Report(manifest.generation, members, adapters)


@app.command()
def show(manifest: ManifestArgument, output: OutputOption = Output.TABLE) -> None:
    """Show the members, their versions and those of the fleet."""
    report = asyncio.run(_report(_store(manifest)))

    def print_tables() -> None:
        versions = table("ADAPTER", ">VERSION", "DIGEST", ">SIZE", ">PREPARED", "BY", "LEASE")
        for row in report.adapters:
            versions.add_row(
                row.name,
                str(row.committed or ""),
                row.digest[:12],
                size(row.bytes) if row.committed else "",
                str(row.prepared or ""),
                row.coordinator[:12],
                ("ended" if row.left else "live") if row.prepared else "",
            )
        members = table("MEMBER", "STATE", "LEASE", ">LAG", ">SENT", ">RECEIVED", "LACKS")
        for member in report.members:
            members.add_row(
                member.target,
                member.state,
                "live" if member.live else "ended",
                "" if member.lag is None else str(member.lag),
                "" if member.sent is None else size(member.sent),
                "" if member.received is None else size(member.received),
                " ".join(member.behind),
            )
        console().print(versions)
        console().print()
        console().print(members)

    output.show(report, print_tables)


@app.command()
def join(manifest: ManifestArgument, target: MemberArgument) -> None:
    """Add a member. The fleet's processes bring it to the fleet's versions."""
    store = _store(manifest)
    asyncio.run(change(store, lambda of: m.renew(of, [target], time.time() + LEASE_SECONDS)))
    print(f"{target} is a member")


@app.command()
def leave(
    manifest: ManifestArgument,
    target: MemberArgument,
    force: Annotated[
        bool, typer.Option("--force", help="At once, also with the only copy of a version.")
    ] = False,
    timeout: TimeoutOption = DEFAULT_TIMEOUT,
) -> None:
    """Remove a member. It gets no more prompts.

    Before, others get the fleet's versions that it alone has.
    """
    with dorad.Fleet(_store(manifest), timeout=timeout) as fleet:
        fleet.leave(target, force=force)
    print(f"{target} is no member")


@app.command()
def proxy(
    manifest: ManifestArgument,
    servers: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="nginx's dorad-servers.conf.", show_default=False),
    ],
    pid_file: Annotated[Path, typer.Option(help="Of nginx.")] = Path("/run/nginx.pid"),
    log_level: Annotated[LogLevel, typer.Option()] = LogLevel.INFO,
    log_format: Annotated[
        LogFormat, typer.Option(help="json: one object a line; text: for terminals.")
    ] = LogFormat.JSON,
) -> None:
    """Keep nginx's list of servers: the members with the fleet's versions. Runs until SIGTERM."""
    start_logging(log_level, log_format)

    def connect(target: str) -> dorad.aio.Client:
        return dorad.aio.Client(target, timeout=PROBE_SECONDS, retry_for=0)

    async def run() -> None:
        await keep(ProxiedServers(connect, _store(manifest), servers, pid_file))

    asyncio.run(run())
