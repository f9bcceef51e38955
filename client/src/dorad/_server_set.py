"""Several servers of one model, and the choice of one for each piece of work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import TypeVar

from dorad import _routing
from dorad._aio.client import Client
from dorad._arguments import items
from dorad._asyncio import is_set_within
from dorad._channel import closed
from dorad._pool_server import LACKING, Server, unavailable
from dorad._retry import Attempts
from dorad.errors import DoradError, Unavailable

T = TypeVar("T")


class ServerSet:
    """Work goes to its home or the server with the least of it, and elsewhere when that fails.

    It owns the clients. Use it from one event loop.
    """

    _may_be_empty = False
    # An unavailable server may answer again, and one that lacks a version serves other requests or
    # reports it; a server with another version must not be used.
    _usable: Sequence[str] = ("ready", "unavailable", "lacking")
    """States of servers that get work; a server of an earlier one first."""

    def __init__(self, targets: Iterable[str], connect: Callable[[str], Client]) -> None:
        self._connect = connect
        self._closed = asyncio.Event()
        self._servers: dict[str, Server] = {}
        for target in items(targets, "targets", "addresses"):
            self.add(target)
        if not self._servers and not self._may_be_empty:
            raise ValueError("a pool needs at least one target")

    @property
    def targets(self) -> list[str]:
        return list(self._servers)

    def add(self, target: str) -> None:
        if target in self._servers:
            raise ValueError(f"{target} is in the pool already")
        self._servers[target] = Server(target, self._connect(target))

    def keep(self, targets: Collection[str]) -> list[Server]:
        """Makes `targets` the servers. Returns those that are none any more: close their clients.

        Work on them moves to others when that happens.
        """
        for target in targets:
            if target not in self._servers:
                self.add(target)
        left = [self._servers.pop(at) for at in self._servers.keys() - set(targets)]
        for server in left:
            server.removed = True
        return left

    async def close(self) -> None:
        self._closed.set()
        await asyncio.gather(*(server.client.close() for server in self._servers.values()))

    def _able(self, tried: set[Server]) -> list[Server]:
        """The servers for the next try, without those already tried."""
        left = [server for server in self._servers.values() if server not in tried]
        for state in self._usable:
            able = [server for server in left if server.state == state]
            if able:
                return able
        return []

    def _choose(self, able: list[Server], adapter: str, home: bytes) -> Server:
        """The server that is asked. `home`: equal for work that should meet on one server."""
        able = [server for server in able if not server.full] or able
        if not home:
            return min(able, key=lambda server: server.load)
        most = _routing.most_load(server.load for server in able)
        return self._home_of([server for server in able if server.load < most], home)

    @staticmethod
    def _home_of(servers: Iterable[Server], home: bytes) -> Server:
        return max(servers, key=lambda server: _routing.affinity(server.target, home))

    def _lacks(self, server: Server, adapter: str) -> None:
        """Notes that a server does not have the version of `adapter`."""

    async def _run(
        self,
        adapter: str,
        attempts: Attempts,
        work: Callable[[Server, bool], Awaitable[T]],
        home: bytes = b"",
    ) -> tuple[T, Server]:
        """Runs `work` on servers until one succeeds. Returns its result, and that server.

        The second argument of `work` is whether another server is left. Raises an error that has
        nothing to do with the server, or the last one when no attempt is left.
        """
        tried: set[Server] = set()
        failure: DoradError | None = None
        while True:
            able = self._able(tried)
            if not able:
                none = unavailable("no server of the pool is ready")
                await self._wait(attempts, failure or none)
                tried, failure = set(), None
                continue
            server = self._choose(able, adapter, home)
            tried.add(server)
            try:
                return await work(server, bool(self._able(tried))), server
            except DoradError as error:
                attempts.failed(error)
                if isinstance(error, Unavailable):
                    server.state = "unavailable"
                    server.lost += 1
                elif error.reason in LACKING:
                    self._lacks(server, adapter)
                    server.lost += 1
                elif not (error.retryable or attempts.meets_itself(error)):
                    raise
                if failure is None or error.retryable:
                    failure = error

    async def _wait(self, attempts: Attempts, failure: DoradError) -> None:
        """Waits for the next attempt. Raises the failure if there is none."""
        delay = attempts.delay(failure)
        if delay is None:
            raise failure
        if await is_set_within(self._closed, delay):
            raise closed()
