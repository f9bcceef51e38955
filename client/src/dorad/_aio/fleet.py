"""A fleet: servers of one model that keep the same versions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Unpack

import dorad.aio
from dorad import types as t
from dorad._aio.rollouts import Rollouts
from dorad._asyncio import Runner
from dorad._pool import connector
from dorad.fleet.coordinator import LEASE_SECONDS
from dorad.fleet.manifest import Manifest
from dorad.fleet.manifest_store import ManifestStore
from dorad.fleet.servers import FleetPool
from dorad.fleet.stores import store_of


class Fleet(Rollouts):
    """Servers that keep the same versions, for one event loop: make it inside a coroutine.

    A manifest says which servers are members and which version of each adapter they shall have. A
    publish sends the adapter to at most two members, which pass it on; members that were away get
    it from the others, and no prompt before. Any number of processes may hold a fleet of the same
    manifest: each repairs what another one has left.

    Args:
      manifest: a file on a disk that all these processes share a host with, configmap:NAME or
        configmap:NAMESPACE/NAME of Kubernetes, ray:NAME for the one of a fleet on Ray, or a store,
        as `dorad.fleet.config_map.ConfigMap`.
      targets: members to add, if they are none yet: addresses as of `Client`, which the servers
        must reach, too (their peers.allowed).
      lease: seconds after which a publish no longer waits for a silent member, and after which
        another process may finish or undo a publish whose process has stopped.
      connect: makes the client of a target, for clients with other arguments.
      token, ca_file, cert_file, key_file: as of `Client`, for every member; not with `connect`.
      timeout, retry_for: as of `RolloutPool`.
    """

    def __init__(
        self,
        manifest: str | os.PathLike[str] | ManifestStore,
        targets: Iterable[str] = (),
        *,
        lease: float = LEASE_SECONDS,
        connect: Callable[[str], dorad.aio.Client] | None = None,
        timeout: float | None = 600.0,
        retry_for: float | None = None,
        token: str | None = None,
        ca_file: str | os.PathLike[str] | None = None,
        cert_file: str | os.PathLike[str] | None = None,
        key_file: str | os.PathLike[str] | None = None,
    ) -> None:
        self._arguments = {name: value for name, value in locals().items() if name != "self"}
        make = connector(
            connect,
            retry_for,
            token=token,
            ca_file=ca_file,
            cert_file=cert_file,
            key_file=key_file,
        )
        store = store_of(manifest)
        self._runner = Runner(lambda: FleetPool(store, targets, make, timeout, retry_for, lease))
        self._pool: FleetPool = self._runner.object

    async def manifest(self) -> Manifest:
        """The fleet's members and versions, as of now."""
        return await self._runner.run(self._pool.manifest())

    async def join(self, target: str) -> None:
        """Adds a member. It gets the fleet's versions from the others, and then prompts."""
        await self._runner.run(self._pool.join(target))

    async def leave(self, target: str, *, force: bool = False) -> None:
        """Removes a member. Its running prompts move to others.

        Before, others get the fleet's versions that it alone has, within the fleet's `timeout`.

        Args:
          force: it leaves at once, also with the only copy of a version.

        Raises:
          Conflict: it is no member.
          PoolError: no other member can get a version, with the reason for each.
        """
        await self._runner.run(self._pool.leave(target, force))

    async def publish(
        self,
        name: str,
        *,
        timeout: float | None = None,
        **options: Unpack[t.PublishOptions],
    ) -> t.AdapterVersion:
        """Publishes a version to all members and makes it the active one.

        It becomes the fleet's when every live member has it or has failed, and more than half of
        all members have it. The others get no prompts until they have it. `durable` is True unless
        given: members that come back get a version from the store of another one.

        Raises:
          Conflict: another process publishes this name; nothing has changed.
          InvalidArgument: the adapter is refused.
          PoolError: too few members have it; nothing is activated. Or, as its message says, it is
            the fleet's, but no member has answered yet that it is active.
        """
        return await self._runner.run(self._pool.publish_release(name, timeout, options))

    async def retire(self, name: str) -> None:
        """Takes the fleet's version of a name back, on all members.

        Raises:
          ValueError: name is no name alone: "name@version", say.
          NotFound: the fleet has no such name.
        """
        await self._runner.run(self._pool.retire_name(name))
