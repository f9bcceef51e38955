"""Servers whose states are known before work is given to them: all of a list, or a fleet's members.

Others publish and repair; this only looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from dorad import types as t
from dorad._access import host_of
from dorad._aio.client import Client
from dorad._channel import PROBE_SECONDS
from dorad._pool_server import LACKING, Server, gather
from dorad._server_set import ServerSet
from dorad.errors import DoradError
from dorad.fleet import manifest as m
from dorad.fleet.coordinator import unknown
from dorad.fleet.manifest_store import ManifestStore

T = TypeVar("T")

_FLEET_SECONDS = 1.0
"""Between two looks at a fleet, whose members and versions change."""

_TOLD = {
    "ready": "server is ready",
    "unavailable": "server takes no requests",
    "stale": "server holds another model, or not the fleet's versions, and gets no requests",
}

_log = logging.getLogger("dorad.servers")


class WatchedServers(ServerSet):
    """Servers of one model. Use it from one event loop.

    Args:
      store: the manifest of a fleet: the servers are its members. Those without the fleet's
        versions get no work. None: the servers are `targets`.
    """

    def __init__(
        self,
        targets: Iterable[str],
        connect: Callable[[str], Client],
        store: ManifestStore | None = None,
    ) -> None:
        self._store = store
        self._manifest = m.Manifest()
        self._told: dict[str, str] = {}
        self._failure = ""
        self._looked = -math.inf
        self._ending: dict[Server, asyncio.Task[None]] = {}
        if store is not None:
            self._may_be_empty, self._usable = True, ("ready",)
        super().__init__(targets, connect)

    async def close(self) -> None:
        await super().close()
        for task in self._ending.values():
            task.cancel()
        await asyncio.gather(*(server.client.close() for server in self._ending))

    @property
    def servers(self) -> list[Server]:
        return list(self._servers.values())

    @property
    def look_age(self) -> float:
        """Seconds since all servers were asked."""
        return time.monotonic() - self._looked

    @property
    def states(self) -> dict[str, str]:
        """By target: "ready", "unavailable", or "stale" for a server of another model or without
        the fleet's versions."""
        return {target: server.state for target, server in self._servers.items()}

    # --- The fleet --------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Takes members and versions from the manifest, if there is one."""
        if self._store is None:
            return
        manifest = await self._store.read()
        if manifest.generation < self._manifest.generation:
            return  # A read that began later has ended first.
        self._manifest = manifest
        for server in self.keep(manifest.members):
            self._told.pop(server.target, None)
            self._ending[server] = asyncio.create_task(self._end(server))

    async def _end(self, server: Server) -> None:
        """An answer that has begun cannot move to another server."""
        while server.outstanding:
            await asyncio.sleep(_FLEET_SECONDS)
        await server.client.close()
        del self._ending[server]

    def addressed(self, ref: str, *, pinned: bool = True) -> str:
        """A reference to an adapter as the one that servers get.

        `pinned`: to the fleet's version, which a server either has or refuses. Raises NotFound for
        a name that the fleet has given up or has not committed yet.
        """
        if ref in self._manifest.adapters and ref not in self._manifest.committed():
            raise unknown(ref)
        return self._manifest.pinned(ref) if pinned else ref

    async def with_versions(
        self,
        refs: Sequence[str | None],
        work: Callable[[list[str | None]], Awaitable[T]],
        *,
        pinned: bool = True,
    ) -> T:
        """Runs `work` with references as servers get them.

        It runs again when a server lacks a version in whose place the manifest has another one.
        """

        def addressed() -> list[str | None]:
            return [ref and self.addressed(ref, pinned=pinned) for ref in refs]

        first = addressed()
        try:
            return await work(first)
        except DoradError as error:
            if error.reason in LACKING:
                with contextlib.suppress(OSError):
                    await self.follow()
            if (now := addressed()) == first:
                raise
        return await work(now)

    # --- State ------------------------------------------------------------------------------------

    async def serving(self) -> bool:
        """Whether at least one server takes requests."""
        tasks = [asyncio.create_task(is_serving(s)) for s in self._servers.values()]
        try:
            for answer in asyncio.as_completed(tasks):
                if await answer:
                    return True
            return False
        finally:
            for task in tasks:
                task.cancel()

    async def look(self) -> None:
        """Asks every server for its state. The first that serves decides on the model."""
        manifest, servers = self._manifest, self.servers
        serving, (infos, _), (held, _) = await asyncio.gather(
            asyncio.gather(*map(is_serving, servers)),
            gather({s.target: s.client.info(timeout=PROBE_SECONDS) for s in servers}),
            gather({s.target: s.client.adapters(timeout=PROBE_SECONDS) for s in servers}),
        )
        self._looked = time.monotonic()
        model: str | None = None
        for server, serves in zip(servers, serving, strict=True):
            state = "ready" if serves else "unavailable"
            if serves and server.target in infos:
                digest = infos[server.target].model.digest
                model = digest if model is None else model
                if digest != model:
                    state = "stale"
            info = infos.get(server.target)
            server.tell(None if info is None else info.engine)
            versions = held.get(server.target, ())
            server.versions = by_name(versions)
            # Not only active ones: a version is the fleet's before it is active everywhere.
            has = {(v.name, v.version, v.digest) for v in versions if v.state == "ready"}
            server.behind = len(manifest.behind(has))
            if serves and server.behind:
                state = "stale"
            if state != self._told.get(server.target) and not server.removed:
                self._told[server.target] = state
                level = logging.INFO if state == "ready" else logging.WARNING
                _log.log(level, _TOLD[state], extra={"fields": {"server": server.target}})
            server.state = state

    async def watch(self) -> None:
        """Keeps members and states up to date. Never returns."""
        while True:
            await asyncio.sleep(PROBE_SECONDS if self._store is None else _FLEET_SECONDS)
            failure = ""
            try:
                await self.follow()
            except (DoradError, OSError, ValueError) as error:
                failure = str(error)
            if failure and failure != self._failure:
                _log.warning("the fleet cannot be followed", extra={"fields": {"why": failure}})
            self._failure = failure
            await self.look()

    async def each(self, ask: Callable[[Client], Awaitable[T]]) -> Mapping[str, T | DoradError]:
        """The answer of every server, or its failure, by target."""
        found, failures = await gather({s.target: ask(s.client) for s in self._servers.values()})
        return {**found, **failures}


def by_name(versions: Iterable[t.AdapterVersion]) -> dict[str, list[t.AdapterVersion]]:
    found: dict[str, list[t.AdapterVersion]] = {}
    for version in versions:
        found.setdefault(version.name, []).append(version)
    return found


async def is_serving(server: Server) -> bool:
    try:
        return await server.client.health(timeout=PROBE_SECONDS) == "serving"
    except DoradError:
        return False


async def address_of(target: str, port: int) -> str:
    """ip:port of the target's host. "": its name stands for none now, as of a pod that is gone."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host_of(target), port, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    host = str(found[0][4][0])
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
