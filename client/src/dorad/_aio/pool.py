"""A pool: several servers of one model as one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Unpack

import dorad.aio
from dorad import types as t
from dorad._aio.rollouts import Rollouts
from dorad._asyncio import Runner
from dorad._pool import Pool, connector


class RolloutPool(Rollouts):
    """Several servers of one model as one, for one event loop: make it inside a coroutine.

    A version is published to all servers under the same number, and becomes active on all of them
    or on none. Prompts that begin alike go to the same server, within bounds.

    Args:
      targets: one address for each server, as of `Client`.
      connect: makes the client of a target, for clients with other arguments.
      token, ca_file, cert_file, key_file: as of `Client`, for every target; not with `connect`.
      timeout: seconds that a prompt may take unless its call says otherwise, tries on other servers
        included; None or math.inf: no limit.
      retry_for: seconds to go on when no server can take a prompt, and for the clients' other calls
        (DORAD_RETRY_FOR). Default: a prompt until its timeout, the others as of `Client`.

    A pickled pool is its arguments, as of `Client`, and its targets of now.

    publish, activate and retire run one after the other, beside any number of generate_many. Their
    `timeout` covers all their calls and the wait for the one before; None: the clients' own, for
    each call to a server.
    """

    def __init__(
        self,
        targets: Iterable[str],
        *,
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
        self._runner = Runner(lambda: Pool(targets, make, timeout, retry_for))
        self._pool = self._runner.object

    def add(self, target: str) -> None:
        """Adds a server. It gets prompts when the pool's active versions are active there."""
        self._runner.call(lambda: self._pool.add(target))

    async def remove(self, target: str) -> None:
        """Removes a server. Its running prompts move to other servers."""
        await self._runner.run(self._pool.remove(target))

    async def publish(
        self,
        name: str,
        *,
        activate: bool = True,
        timeout: float | None = None,
        **options: Unpack[t.PublishOptions],
    ) -> t.AdapterVersion:
        """Publishes to all servers at the same time, under one number; returns when all are ready.

        The number is the first one that is free on every server. With `activate` the version
        becomes active when it is ready everywhere.

        Raises:
          PoolError: servers failed, or took longer than `timeout` seconds. Nothing is activated,
            and the version is retired where it had become ready.
        """
        return await self._runner.run(self._pool.publish(name, activate, timeout, options))

    async def activate(
        self, version: str | t.AdapterVersion, *, timeout: float | None = None
    ) -> t.AdapterVersion:
        """Makes a version ("name@version") active on all servers, if all have it ready.

        Raises:
          PoolError: a server does not have it ready, or failed to activate it; the servers that
            had activated it are then set back to the version before.
        """
        return await self._runner.run(self._pool.activate(version, timeout))

    async def retire(
        self, version: str | t.AdapterVersion, *, force: bool = False, timeout: float | None = None
    ) -> None:
        """Unpublishes a version on all servers, as `Client.retire`. Raises PoolError."""
        await self._runner.run(self._pool.retire(version, force, timeout))
