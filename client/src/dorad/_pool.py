"""The work of a pool, for one event loop. Its public form is in dorad._aio.pool.

Expected versions: for each adapter name the pool knows the version that it has activated (or found
active everywhere at its first use). Requests that name just the adapter must be answered by that
version, or, during an activation, by the one before or after.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import statistics
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

from dorad import _references, _routing
from dorad import types as t
from dorad._aio.client import Client
from dorad._asyncio import run_many
from dorad._channel import PROBE_SECONDS, Budget, deadline
from dorad._pool_server import History, Server, conflict, gather
from dorad._retry import Attempts, check_retry_for, default_retry_for
from dorad._server_set import ServerSet
from dorad.errors import (
    DeadlineExceeded,
    DoradError,
    NotFound,
    PoolError,
    UnexpectedVersion,
)

STRAGGLER_FACTOR = 2.0


def connector(
    connect: Callable[[str], Client] | None, retry_for: float | None, **access: Any
) -> Callable[[str], Client]:
    """`connect`, or a function that makes clients with the same token and certificate."""
    if connect is None:
        return lambda target: Client(target, retry_for=retry_for, **access)
    if any(value is not None for value in access.values()):
        raise ValueError("give token, ca_file, cert_file and key_file to the clients of connect")
    return connect


class Pool(ServerSet):
    """Several servers of one model as one: versions become active on all of them or on none.

    Methods, arguments and errors are those of `RolloutPool`, where they are described.
    """

    def __init__(
        self,
        targets: Iterable[str],
        connect: Callable[[str], Client],
        timeout: float | None,
        retry_for: float | None,
    ) -> None:
        super().__init__(targets, connect)
        self._timeout = timeout
        self._retry_for = default_retry_for(retry_for)
        self._change = asyncio.Lock()
        self._history: dict[str, History] = {}  # by adapter name
        self._highest: dict[str, int] = {}

    def _clients(self) -> dict[str, Client]:
        return {target: server.client for target, server in self._servers.items()}

    async def remove(self, target: str) -> None:
        if self.targets == [target]:
            raise ValueError(f"{target} is the pool's only server")
        server = self._servers.pop(target)
        server.removed = True
        await server.client.close()

    # --- Versions ---------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _changing(self, timeout: float | None) -> AsyncIterator[Budget]:
        """A block that excludes other changes; gives the rest of the timeout."""
        budget = Budget(timeout)
        try:
            async with asyncio.timeout(budget.left):
                await self._change.acquire()
        except TimeoutError:
            raise DeadlineExceeded(
                "the change before this one has not ended", code="DEADLINE_EXCEEDED"
            ) from None
        try:
            yield budget
        finally:
            self._change.release()

    async def publish(
        self, name: str, activate: bool, timeout: float | None, options: t.PublishOptions
    ) -> t.AdapterVersion:
        async with self._changing(timeout) as budget:
            known, failures = await gather(
                {at: c.adapters(name, timeout=budget.left) for at, c in self._clients().items()}
            )
            if failures:
                raise PoolError(f"{name!r} was not published, servers do not answer", failures)
            numbers = [version.version for versions in known.values() for version in versions]
            number = 1 + max([self._highest.get(name, 0), *numbers])
            self._highest[name] = number
            clients = self._clients()
            made, failures = await gather(
                {
                    at: c.publish(
                        name, version=number, activate=False, timeout=budget.left, **options
                    )
                    for at, c in clients.items()
                }
            )
            if failures:
                # A server whose answer was lost keeps it: ready, but unused.
                await gather(
                    {at: clients[at].retire(name, number, timeout=PROBE_SECONDS) for at in made}
                )
                raise PoolError(f"{name}@{number} was not published everywhere", failures)
            if activate:
                return await self._activate(name, number, budget)
            return next(iter(made.values()))

    async def activate(
        self, version: str | t.AdapterVersion, timeout: float | None
    ) -> t.AdapterVersion:
        ref = version if isinstance(version, str) else version.ref
        name, number, digest = _references.split_ref(ref, None)
        async with self._changing(timeout) as budget:
            return await self._activate(name, number, budget, digest)

    async def _activate(
        self, name: str, number: int, budget: Budget, pin: str = ""
    ) -> t.AdapterVersion:
        """`pin`: the digest must begin with it."""
        ref = f"{name}@{number}"
        clients = self._clients()
        known, failures = await gather(
            {at: c.adapters(name, timeout=budget.left) for at, c in clients.items()}
        )
        before: dict[str, int] = {}
        digests: dict[str, str] = {}
        for target, versions in known.items():
            before[target] = next((v.version for v in versions if v.active), 0)
            named = (v for v in versions if v.version == number and v.digest.startswith(pin))
            found = next(named, None)
            if found is None:
                failures[target] = NotFound(f"there is no {ref}", code="NOT_FOUND")
            elif found.state != "ready":
                failures[target] = conflict(f"{ref} is {found.state}, not ready")
            else:
                digests[target] = found.digest
        if len(set(digests.values())) > 1:
            failures |= {at: conflict(f"{ref} is {digest}") for at, digest in digests.items()}
        if failures:
            message = f"{ref} is not ready on every server, or not the same; nothing was activated"
            raise PoolError(message, failures)

        actives = {
            (v.version, v.digest) for versions in known.values() for v in versions if v.active
        }
        if name not in self._history and len(actives) == 1 and all(before.values()):
            self._history[name] = History(list(actives))
        history = self._history.setdefault(name, History([]))
        history.versions.append((number, next(iter(digests.values()))))
        try:
            done, failures = await gather(
                {at: c.activate(name, number, timeout=budget.left) for at, c in clients.items()}
            )
        except BaseException:
            await self._roll_back(name, before)
            raise
        if failures:
            stuck = await self._roll_back(name, before)
            # The state of a server without an answer is unknown: it is in `failures`.
            stuck = {target: error for target, error in stuck.items() if target in done}
            for target in failures.keys() | stuck.keys():
                if target in self._servers:
                    self._servers[target].state = "unavailable"  # Until it has been asked.
            raise PoolError(f"{ref} was not activated everywhere", failures, stuck)
        history.settle()
        return next(iter(done.values())).adapter

    async def _roll_back(self, name: str, before: Mapping[str, int]) -> dict[str, DoradError]:
        """Sets every server back to the version it had; returns the servers where that failed."""
        clients = self._clients()
        _, failures = await gather(
            {
                at: clients[at].activate(name, number, timeout=PROBE_SECONDS)
                for at, number in before.items()
                if number and at in clients
            }
        )
        for target, number in before.items():
            if not number:
                failures[target] = conflict("no version was active before")
        history = self._history[name]
        if len(history.versions) > 1:
            history.versions.append(history.versions[history.settled])
            history.settle()
        else:
            del self._history[name]
        return failures

    async def retire(
        self, version: str | t.AdapterVersion, force: bool, timeout: float | None
    ) -> None:
        ref = version if isinstance(version, str) else version.ref
        name, number, _ = _references.split_ref(ref, None)
        async with self._changing(timeout) as budget:
            _, failures = await gather(
                {
                    at: c.retire(ref, force=force, timeout=budget.left)
                    for at, c in self._clients().items()
                }
            )
            if failures:
                raise PoolError(f"{ref} was not retired everywhere", failures)
            history = self._history.get(name)
            if history and history.versions[history.settled][0] == number:
                del self._history[name]

    # --- Generation -------------------------------------------------------------------------------

    async def generate_many(
        self,
        todo: Sequence[t.GenerateRequest],
        timeout: float | None,
        retry_for: float | None,
        **options: Any,
    ) -> list[Any]:
        """`options` as of `run_many`."""
        timeout = deadline(timeout, self._timeout) or math.inf
        patience = self._retry_for if retry_for is None else check_retry_for(retry_for)
        patience = math.inf if patience is None else patience
        await self._prepare(todo, Attempts(Budget(timeout), patience))
        probing = asyncio.create_task(self._keep_probing())
        try:
            return await run_many(
                todo,
                lambda request: self._generate(request, Attempts(Budget(timeout), patience)),
                choose=self._next,
                **options,
            )
        finally:
            probing.cancel()

    async def _prepare(self, todo: Sequence[t.GenerateRequest], attempts: Attempts) -> None:
        """Learns the servers' states and the active versions of the prompts' adapters."""
        names = {r.adapter for r in todo if r.adapter and "@" not in r.adapter}
        while True:
            patience = min(PROBE_SECONDS, attempts.budget.left or PROBE_SECONDS)
            await self._probe(patience)
            try:
                for name in names - self._history.keys():
                    await self._learn(name, patience)
            except DoradError as error:
                await self._wait(attempts, error)
            else:
                return

    async def _keep_probing(self) -> None:
        """Lets servers return that were away, full or paused."""
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            await self._probe()

    def _next(self, waiting: Iterable[t.GenerateRequest]) -> int:
        """The place of the prompt that begins next: one whose home has room, if it waits."""
        able = self._able(set())
        if not able:
            return 0
        most = _routing.most_load(server.load for server in able)
        homes = (self._home_of(able, self._key(request)) for request in waiting)
        return _routing.first_at_home(home.load < most for home in homes)

    @staticmethod
    def _key(request: t.GenerateRequest) -> bytes:
        return _routing.home_key(request.adapter or "", request.token_ids)

    async def _generate(self, request: t.GenerateRequest, attempts: Attempts) -> list[t.Sample]:
        if request.request_id is None:  # One id for all attempts, as of a client.
            request = dataclasses.replace(request, request_id=uuid.uuid4().hex)
        samples, _ = await self._run(
            request.adapter or "",
            attempts,
            lambda server, _: self._attempt(server, request, attempts.budget.left),
            self._key(request),
        )
        return samples

    async def _attempt(
        self, server: Server, request: t.GenerateRequest, timeout: float | None
    ) -> list[t.Sample]:
        history = self._history.get(request.adapter or "")
        mark = history.settled if history else 0
        samples = await server.generate(request, timeout)
        self._check(request, samples, server, history, mark)
        return samples

    def _lacks(self, server: Server, adapter: str) -> None:
        if self._is_expected(adapter):
            server.state = "lacking"

    def _is_expected(self, ref: str) -> bool:
        """Whether every server should have the version of `ref`."""
        name, pinned, _ = _references.ref_parts(ref)
        history = self._history.get(name)
        if history is None:
            return False
        return not pinned or pinned in {str(n) for n, _ in history.versions[history.settled :]}

    def _check(
        self,
        request: t.GenerateRequest,
        samples: list[t.Sample],
        server: Server,
        history: History | None,
        mark: int,
    ) -> None:
        """Raises UnexpectedVersion unless the samples' versions were expected to be active."""
        name, pinned, digest = _references.ref_parts(request.adapter or "")
        wanted = history.versions[mark:] if history else []
        for span in (span for sample in samples for span in sample.spans):
            fits = span.adapter == name
            if pinned:
                fits = fits and span.version == int(pinned) and span.digest.startswith(digest)
            elif name:
                fits = fits and (span.version, span.digest) in wanted
            if not fits:
                server.unexpected += 1
                server.state = "stale"
                expected = [f"{name}@{version}" for version, _ in wanted if not pinned]
                raise UnexpectedVersion(
                    f"{server.target} answered with {span.label or 'the base model'}"
                    f" {span.digest[:12]} to a request for {request.adapter or 'the base model'}"
                    + (f", which is {' or '.join(expected)}" if expected else ""),
                    code="FAILED_PRECONDITION",
                )

    # --- State ------------------------------------------------------------------------------------

    async def _probe(self, patience: float = PROBE_SECONDS) -> None:
        """Checks whether servers that were not ready are ready again."""
        waiting = [server for server in self._servers.values() if server.state != "ready"]
        states = await asyncio.gather(*(self._state(server, patience) for server in waiting))
        for server, state in zip(waiting, states, strict=True):
            server.state = state

    async def _state(self, server: Server, patience: float) -> str:
        try:
            if await server.client.health(timeout=patience) != "serving":
                return "unavailable"
            for name, history in list(self._history.items()):
                found = await server.client.adapter(name, timeout=patience)
                if (found.version, found.digest) not in history.versions[history.settled :]:
                    return "stale"
        except NotFound:
            return "lacking"
        except DoradError:
            return "unavailable"
        return "ready"

    async def _learn(self, name: str, patience: float) -> None:
        """Adopts the version that is active on all answering servers."""
        asked = {server.target: server.client for server in self._able(set())}
        found, failures = await gather(
            {at: client.adapter(name, timeout=patience) for at, client in asked.items()}
        )
        if not found:
            raise next(iter(failures.values()))
        for target in [at for at, error in failures.items() if not isinstance(error, NotFound)]:
            del failures[target]
            if target in self._servers:
                self._servers[target].state = "unavailable"
        if len({(v.version, v.digest) for v in found.values()}) > 1:
            failures |= {target: conflict(f"{v.label} is active") for target, v in found.items()}
        if failures:
            raise PoolError(f"the servers do not agree on the active version of {name!r}", failures)
        for version in found.values():
            self._history[name] = History([(version.version, version.digest)])

    async def report(self) -> list[t.TargetReport]:
        await self._probe()
        servers = dict(self._servers)
        (infos, failures), (versions, failed) = await asyncio.gather(
            gather({at: s.client.info(timeout=PROBE_SECONDS) for at, s in servers.items()}),
            gather({at: s.client.adapters(timeout=PROBE_SECONDS) for at, s in servers.items()}),
        )
        for target in failures | failed:
            servers[target].state = "unavailable"
        seen = [server.latency for server in servers.values() if server.latencies]
        slow = STRAGGLER_FACTOR * statistics.median_low(seen) if seen else math.inf
        return [
            t.TargetReport(
                target=target,
                state="stale" if server.state == "lacking" else server.state,
                versions={v.name: v.version for v in versions.get(target, ()) if v.active},
                outstanding=server.outstanding,
                oldest=server.oldest(),
                completed=server.completed,
                lost=server.lost,
                unexpected_version=server.unexpected,
                latency=server.latency,
                straggler=server.latency > slow or server.oldest() > slow,
                queued=infos[target].engine.queued_requests if target in infos else 0,
                running=infos[target].engine.running_sequences if target in infos else 0,
            )
            for target, server in servers.items()
        ]
