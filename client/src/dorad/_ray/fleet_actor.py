"""The detached Ray actor of a fleet: it keeps the manifest, and the list of its servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import shutil
import time
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dorad._pool_server import gather, unavailable
from dorad._ray.calls import answer
from dorad._ray.server_actor import ServerActor, ServerSpec, ServerState
from dorad.errors import PoolError
from dorad.fleet import manifest as m
from dorad.fleet.coordinator import LEASE_SECONDS
from dorad.fleet.manifest_store import ManifestFile, change, replace_file

NAMESPACE = "dorad"
"""Of all its actors, so that every job of the cluster finds them."""

_STOP_SECONDS = 60.0
"""More than a server's own limit for its end."""


class FleetActor:
    """Runs as an actor of coroutines. Ray starts it again when it dies: it reads its files then.

    The manifest's journal is a `ManifestFile`. Beside it `servers.json` has the target of each
    server by its number, written before a server is placed and after it is gone.
    """

    def __init__(self, name: str, spec: ServerSpec) -> None:
        self._name = name
        self._spec = spec
        self._scaling = asyncio.Lock()
        self._servers: dict[int, Any] = {}
        self._targets: dict[int, str] = {}
        self._manifest_path = pathlib.Path(spec.folder, "manifest.json")
        self._servers_path = pathlib.Path(spec.folder, "servers.json")
        self._store = ManifestFile(self._manifest_path)
        if ray.get_runtime_context().was_current_actor_reconstructed:
            # Without its files it would forget versions that are acknowledged.
            found = json.loads(self._servers_path.read_text(encoding="utf-8"))
            self._targets = {int(number): target for number, target in found.items()}
            for number in self._targets:
                self._servers[number] = self._place(number)
        else:
            self._servers_path.parent.mkdir(parents=True, exist_ok=True)
            if self._servers_path.exists():
                raise FileExistsError(f"another fleet's files are there: {self._servers_path}")
            self._write()

    def _write(self) -> None:
        replace_file(self._servers_path, json.dumps(self._targets).encode())

    # --- The manifest -----------------------------------------------------------------------------

    async def read(self) -> m.Manifest:
        return await self._store.read()

    async def compare_and_set(self, expected: int, manifest: m.Manifest) -> bool:
        return await self._store.compare_and_set(expected, manifest)

    async def _replace_member(self, old: str, new: str) -> None:
        def how(manifest: m.Manifest) -> m.Manifest:
            if old != new and old in manifest.members:
                manifest = m.leave(manifest, old)
            return m.renew(manifest, [new] if new else [], time.time() + LEASE_SECONDS)

        await change(self._store, how)

    # --- Servers ----------------------------------------------------------------------------------

    async def spec(self) -> ServerSpec:
        return self._spec

    async def joined(self, number: int, target: str) -> None:
        """A server has started: it is a member, in the place of its last start."""
        if number in self._targets:
            await self._replace_member(self._targets[number], target)
            self._targets[number] = target
            self._write()

    async def servers(self) -> list[ServerState]:
        return list(await asyncio.gather(*map(self._state, sorted(self._servers))))

    async def _state(self, number: int) -> ServerState:
        asked = self._servers[number].state.remote()
        try:
            state: ServerState = await asyncio.wait_for(_value(asked), 1.0)
        except TimeoutError:  # Its place or its restart is pending.
            return ServerState(number, "starting", reason=self._missing())
        except RayActorError as error:
            return ServerState(number, "failed", reason=str(error))
        return state

    def _missing(self) -> str:
        return f"the cluster has not placed it yet: it needs {self._bundle()}"

    def _bundle(self) -> dict[str, float]:
        return {k: v for k, v in (("CPU", self._spec.cpus), ("GPU", self._spec.gpus)) if v}

    def _place(self, number: int) -> Any:
        """The server's actor, which is made if there is none."""
        # A placement group of its own: its place stays reserved while the actor restarts.
        place = f"dorad/{self._name}/{number}"
        try:
            group = ray.util.get_placement_group(place)
        except ValueError:
            group = ray.util.placement_group([self._bundle()], name=place, lifetime="detached")
        return (
            ray.remote(ServerActor)
            .options(
                name=f"{self._name}/{number}",
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=self._spec.cpus,
                num_gpus=self._spec.gpus,
                max_restarts=self._spec.max_restarts,
                max_concurrency=8,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group),
            )
            .remote(ray.get_runtime_context().current_actor, number, self._spec)
        )

    async def scale(self, count: int, timeout: float) -> list[ServerState]:
        """As `Fleet.scale`."""
        async with self._scaling:
            states = await self.servers()
            lost = [state.number for state in states if state.state in ("failed", "stopped")]
            kept = [number for number in sorted(self._servers) if number not in lost]
            await asyncio.gather(*map(self._remove, [*lost, *kept[count:]]))
            free = (n for n in range(count) if n not in self._servers)
            fresh = [next(free) for _ in range(count - len(self._servers))]
            self._targets |= dict.fromkeys(fresh, "")
            self._write()
            for number in fresh:
                self._servers[number] = self._place(number)
            _, failures = await gather(
                {f"server {number}": self._settled(number, timeout) for number in self._servers}
            )
            if failures:
                failed = [n for n in fresh if f"server {n}" in failures]
                await asyncio.gather(*map(self._remove, failed))
                started = count - len(failures)
                raise PoolError(f"{started} of {count} servers of {self._name!r} run", failures)
            return await self.servers()

    async def _settled(self, number: int, timeout: float) -> None:
        waiting = self._servers[number].settled.remote()
        try:
            state = await asyncio.wait_for(answer(waiting), timeout)
        except TimeoutError:
            state = await self._state(number)
            reason = state.reason or "its model still loads"
            raise unavailable(f"it does not run within {timeout:g} s: {reason}") from None
        if state.state != "running":
            raise unavailable(state.reason or state.state)

    async def _remove(self, number: int) -> None:
        """Drains a server that runs, ends it, and frees its place."""
        server, target = self._servers[number], self._targets[number]
        if target:
            with contextlib.suppress(RayActorError, TimeoutError):
                await asyncio.wait_for(_value(server.stop.remote()), _STOP_SECONDS)
            await self._replace_member(target, "")
        ray.kill(server)
        with contextlib.suppress(ValueError):
            ray.util.remove_placement_group(
                ray.util.get_placement_group(f"dorad/{self._name}/{number}")
            )
        del self._servers[number], self._targets[number]
        self._write()

    async def shut_down(self) -> None:
        """Ends all servers and removes the files."""
        await self.scale(0, _STOP_SECONDS)
        shutil.rmtree(self._spec.folder)


async def _value(reference: Any) -> Any:
    return await reference
