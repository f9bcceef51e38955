"""A fleet whose servers are actors of a Ray cluster."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import dorad.aio
from dorad._aio.fleet import Fleet as AnyFleet
from dorad._ray.calls import ActorManifest, answer
from dorad._ray.find import end_fleet, find_fleet, scale
from dorad._ray.server_actor import ServerState
from dorad.fleet.coordinator import LEASE_SECONDS


class Fleet(AnyFleet):
    """A fleet whose servers are actors of a Ray cluster: `dorad.Fleet`, and `scale`.

    The first one of a name makes the fleet, which lasts until `shutdown` or the end of the cluster;
    others of that name find it, in any job of the cluster. Ray restarts what dies. The manifest is
    kept by an actor of the cluster. It can be sent to Ray's tasks and actors.

    Args:
      name: of the fleet, in the cluster.
      model: the folder of the model on every node; None: the fleet must be there.
      address: of a cluster, as ray.init takes it, when Ray is not initialised yet.
      settings: of the servers, as of `local_server`. server.grpc_listen, server.metrics_listen
        (the node's address, free ports), adapters.store_path (in `folder`), peers.allowed (private
        networks) and log.level (warning) have values unless given. A network that others can reach
        needs TLS and tokens, or security.allow_insecure.
      environment: further variables of the servers' environment.
      program: the server; default: DORAD_BINARY of the node, or else `dorad` on its PATH.
      cpus, gpus: what Ray reserves for each server.
      folder: on each node, for the servers' stores, and on the head node for the manifest. Default:
        one in the temporary folder.
      max_restarts: of a server's process in ten minutes, and of its actor, before it has failed.
      lease, connect, timeout, retry_for, token, ca_file, cert_file, key_file: as of `dorad.Fleet`.

    Raises:
      NotFound: there is no fleet of that name, and `model` is None.
      ValueError: the fleet of that name has other servers.
    """

    def __init__(
        self,
        name: str,
        *,
        model: str | os.PathLike[str] | None = None,
        address: str | None = None,
        settings: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
        program: str | os.PathLike[str] | None = None,
        cpus: float = 1,
        gpus: float = 0,
        folder: str | os.PathLike[str] | None = None,
        max_restarts: int = 5,
        lease: float = LEASE_SECONDS,
        connect: Callable[[str], dorad.aio.Client] | None = None,
        timeout: float | None = 600.0,
        retry_for: float | None = None,
        token: str | None = None,
        ca_file: str | os.PathLike[str] | None = None,
        cert_file: str | os.PathLike[str] | None = None,
        key_file: str | os.PathLike[str] | None = None,
    ) -> None:
        self._actor = find_fleet(
            name,
            address,
            model=model,
            settings=settings,
            environment=environment,
            program=program,
            cpus=cpus,
            gpus=gpus,
            folder=folder,
            max_restarts=max_restarts,
        )
        options: dict[str, Any] = {
            "lease": lease,
            "connect": connect,
            "timeout": timeout,
            "retry_for": retry_for,
            "token": token,
            "ca_file": ca_file,
            "cert_file": cert_file,
            "key_file": key_file,
        }
        super().__init__(ActorManifest(self._actor), **options)
        self._arguments = {"name": name, **options}

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(type(self), **self._arguments), ()

    async def scale(self, count: int, *, timeout: float = 600.0) -> list[ServerState]:
        """Makes the fleet have `count` servers, and returns when all of them run.

        New ones are placed by Ray, and get the fleet's versions before prompts. Those that are too
        many, the last ones, finish their prompts and leave, after others have got the versions that
        they alone had (not with 0). Those that have failed are replaced. Calls run one after the
        other.

        Raises:
          PoolError: servers do not run within `timeout` seconds, with the reason of each. New ones
            among them are taken back. Or others cannot get a version, with the reason.
        """
        return await self._runner.run(scale(self._actor, self._pool, count, timeout))

    async def servers(self) -> list[ServerState]:
        """The servers as their actors see them. `report` has the prompts' view."""
        return await self._runner.run(answer(self._actor.servers.remote()))

    async def shutdown(self) -> None:
        """Ends the servers and the fleet for all its holders, and closes this one.

        Running prompts finish. The manifest and the servers' stores are removed.
        """
        await self._runner.run(end_fleet(self._actor))
        await self.close()
