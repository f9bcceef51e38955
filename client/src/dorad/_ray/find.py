"""A fleet's actor, found by its name or made."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray

from dorad._ray.calls import answer
from dorad._ray.fleet_actor import NAMESPACE, FleetActor
from dorad._ray.server_actor import ServerSpec, ServerState
from dorad.errors import NotFound
from dorad.fleet.servers import FleetPool


def actor_of(name: str, address: str | None) -> Any:
    """The actor of a fleet that is there. Raises NotFound.

    `address`: of the cluster, if Ray is not initialised yet.
    """
    if not ray.is_initialized():
        ray.init(address)
    try:
        return ray.get_actor(name, NAMESPACE)
    except ValueError:
        raise NotFound(f"the cluster has no fleet {name!r}", code="NOT_FOUND") from None


def find_fleet(
    name: str,
    address: str | None,
    *,
    model: str | os.PathLike[str] | None,
    settings: Mapping[str, object] | None,
    environment: Mapping[str, str] | None,
    program: str | os.PathLike[str] | None,
    cpus: float,
    gpus: float,
    folder: str | os.PathLike[str] | None,
    max_restarts: int,
) -> Any:
    """Arguments and errors are those of `dorad.ray.Fleet`."""
    if ray.is_initialized() and address is not None:
        raise ValueError("Ray is initialised already, with its own cluster: leave address out")
    if model is None:
        return actor_of(name, address)
    if not ray.is_initialized():
        ray.init(address)
    own = os.path.join(tempfile.gettempdir(), f"dorad-{name}-{uuid.uuid4().hex}")
    wanted = ServerSpec(
        model=os.fspath(model),
        settings=dict(settings or {}),
        environment=dict(environment or {}),
        program=None if program is None else os.fspath(program),
        cpus=cpus,
        gpus=gpus,
        folder=own if folder is None else os.fspath(folder),
        max_restarts=max_restarts,
    )
    actor = (
        ray.remote(FleetActor)
        .options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            # The node whose end is the cluster's end: its files last as long as the fleet.
            resources={"node:__internal_head__": 0.001},
            max_restarts=-1,
            max_concurrency=1000,
        )
        .remote(name, wanted)
    )
    found: ServerSpec = ray.get(actor.spec.options(max_task_retries=-1).remote())
    if folder is None:
        wanted = replace(wanted, folder=found.folder)
    if found != wanted:
        raise ValueError(f"the fleet {name!r} has other servers: {found}, not {wanted}")
    return actor


async def scale(actor: Any, pool: FleetPool, count: int, timeout: float) -> list[ServerState]:
    """As `Fleet.scale`, whose pool then knows the members."""
    if count > 0:  # As the actor chooses them.
        found: list[ServerState] = await answer(actor.servers.remote())
        kept = [server for server in found if server.state not in ("failed", "stopped")]
        if going := [server.target for server in kept[count:] if server.target]:
            await pool.spare(going)
    states: list[ServerState] = await answer(actor.scale.remote(count, timeout))
    await pool.tend()
    return states


async def end_fleet(actor: Any) -> None:
    """Ends all servers, and then the actor."""
    await answer(actor.shut_down.remote())
    ray.kill(actor)
