"""A fleet's members as a pool of servers, which follows the manifest.

Prompts go to members that have the manifest's versions, and name version and digest: a member that
has come back with another version refuses them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from dorad import types as t
from dorad._aio.client import Client
from dorad._pool import Pool
from dorad._pool_server import LACKING, History, Server
from dorad._publish import Upload
from dorad._retry import Attempts
from dorad.errors import DeadlineExceeded, DoradError, PoolError, Unavailable, UnexpectedVersion
from dorad.fleet import manifest as m
from dorad.fleet.calls import ServerCalls
from dorad.fleet.coordinator import Coordinator, unknown
from dorad.fleet.manifest_store import ManifestStore

_logger = logging.getLogger("dorad")

TEND_SECONDS = 1.0
"""Between two rounds of reading the manifest and repairing members."""


def _is_name(ref: str | None) -> TypeGuard[str]:
    """Whether a reference to an adapter names no version."""
    return bool(ref and "@" not in ref)


def _is_pinned(request: t.GenerateRequest) -> bool:
    """Whether one version makes all tokens."""
    return request.in_flight_policy in (None, "pin")


class FleetPool(Pool):
    """The work of a fleet, for one event loop; make it there. Its public form is `dorad.Fleet`."""

    _may_be_empty = True
    # Never a server that has not shown the manifest's versions.
    _usable = ("ready",)

    def __init__(
        self,
        store: ManifestStore,
        targets: Iterable[str],
        connect: Callable[[str], Client],
        timeout: float | None,
        retry_for: float | None,
        lease: float,
    ) -> None:
        super().__init__([], connect, timeout, retry_for)
        self._store = store
        self._joining = list(targets)
        self._manifest = m.Manifest()
        self._calls = ServerCalls(self._client)
        self._coordinator = Coordinator(store, self._calls, lease=lease)
        self._first_round = asyncio.Event()
        self._tending = asyncio.ensure_future(self._keep_tending())

    async def close(self) -> None:
        self._tending.cancel()
        await asyncio.gather(self._tending, return_exceptions=True)
        await self._coordinator.close()
        await super().close()

    # --- The manifest -----------------------------------------------------------------------------

    async def manifest(self) -> m.Manifest:
        return await self._store.read()

    async def _keep_tending(self) -> None:
        while True:
            try:
                await self.tend()
            except (DoradError, OSError, ValueError) as error:  # The next round tries again.
                _logger.warning("the fleet's manifest or its members fail: %s", error)
            self._first_round.set()
            await asyncio.sleep(TEND_SECONDS)

    async def tend(self) -> None:
        """One round: joins what is to join, repairs members, and follows the manifest."""
        if self._joining:
            await self._coordinator.join(self._joining)
            self._joining = []
        await self._follow()
        reasons = await self._coordinator.tend()
        await self._follow()
        for target, reason in reasons.items():
            if target in self._servers and reason is not None:
                self._servers[target].state = (
                    "unavailable" if isinstance(reason, Unavailable) else "stale"
                )
        await self._probe()

    def _client(self, target: str) -> Client:
        if target not in self._servers:
            self.add(target)
        return self._servers[target].client

    async def _follow(self) -> None:
        """Takes members and versions from the manifest."""
        manifest = await self._store.read()
        if manifest.generation < self._manifest.generation:
            return  # A read that began later has ended first.
        self._manifest = manifest
        left = self.keep(manifest.members)
        committed = manifest.committed()
        for name in self._history.keys() - committed.keys():
            del self._history[name]
        for name, release in committed.items():
            history = self._history.setdefault(name, History([]))
            if (release.version, release.digest) not in history.versions[-1:]:
                history.versions.append((release.version, release.digest))
                history.settle()
        for server in left:
            await server.client.close()

    # --- What callers do --------------------------------------------------------------------------

    async def join(self, target: str) -> None:
        await self._coordinator.join([target])
        await self.tend()

    async def leave(self, target: str, force: bool) -> None:
        async with self._in_time(f"{target} has not left"):
            await self._coordinator.leave(target, force=force)
        await self._follow()

    async def spare(self, targets: Collection[str]) -> None:
        """As `leaving.spare`, in the time that the pool has for a change."""
        async with self._in_time(f"{', '.join(targets)} cannot leave"):
            await self._coordinator.spare(targets)

    @contextlib.asynccontextmanager
    async def _in_time(self, failure: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout):
                yield
        except TimeoutError:
            message = f"{failure}: the others have not got its versions in time"
            raise DeadlineExceeded(message, code="DEADLINE_EXCEEDED") from None

    async def publish_release(
        self, name: str, timeout: float | None, options: Mapping[str, Any]
    ) -> t.AdapterVersion:
        """`options`: of `PublishOptions`."""
        values = {"durable": True} | {k: v for k, v in options.items() if v is not None}
        if values.pop("server_side", False):
            raise ValueError("a fleet sends the adapter from here: server_side is not possible")
        if "retry_for" in values:
            raise ValueError("a publish goes on without members that fail: no retry_for")
        origin = {
            key: values.pop(key, None)
            for key in ("path", "tensors", "model", "model_adapter", "config")
        }
        source = Upload({}, progress=None, **origin)
        config, tensors = await asyncio.to_thread(source.hashes)
        files = m.Files(config, tensors, source.size)
        try:
            async with self._changing(timeout) as budget:
                await self._first_round.wait()
                self._calls.sources[files] = source
                async with asyncio.timeout(budget.left):
                    outcome = await self._coordinator.publish(name, files, values)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{name!r} was not published in time", code="DEADLINE_EXCEEDED"
            ) from None
        finally:
            self._calls.sources.pop(files, None)
        await self._follow()
        for target, error in outcome.behind.items():
            if target in self._servers:
                self._servers[target].state = "unavailable"
            _logger.warning("%s is behind in the fleet: %s", target, error)
        if not outcome.active:
            ref = f"{name}@{outcome.release.version}"
            message = f"{ref} is committed, but no member has answered that it is active"
            raise PoolError(message, dict(outcome.behind))
        return next(iter(outcome.active.values()))

    async def retire_name(self, name: str) -> None:
        if not _is_name(name):
            raise ValueError(f"retire takes a name without a version, not {name!r}")
        await self._coordinator.retire(name)
        await self._follow()

    # --- Prompts ----------------------------------------------------------------------------------

    async def _prepare(self, todo: Sequence[t.GenerateRequest], attempts: Attempts) -> None:
        await self._first_round.wait()
        with contextlib.suppress(OSError):  # The manifest of the last round is as good.
            await self._follow()
        await self._probe()

    async def _attempt(
        self, server: Server, request: t.GenerateRequest, timeout: float | None
    ) -> list[t.Sample]:
        try:
            return await super()._attempt(server, self._addressed(request), timeout)
        except DoradError as error:
            other = isinstance(error, UnexpectedVersion) and not _is_pinned(request)
            if other or (error.reason in LACKING and _is_name(request.adapter)):
                # The manifest may have another version by now, or the member soon has this one.
                error.retryable = True
                with contextlib.suppress(OSError):
                    await self._follow()
            raise

    def _addressed(self, request: t.GenerateRequest) -> t.GenerateRequest:
        adapter = request.adapter
        if not _is_name(adapter):
            return request
        if adapter not in self._manifest.committed():
            raise unknown(adapter)
        if not _is_pinned(request):
            return request
        return dataclasses.replace(request, adapter=self._manifest.pinned(adapter))
