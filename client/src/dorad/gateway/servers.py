"""The servers behind the gateway, and the calls to them on behalf of its callers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections import OrderedDict
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Sequence,
)
from typing import Any, Self, TypeVar, Unpack, cast
from weakref import WeakValueDictionary

from dorad import _routing
from dorad import types as t
from dorad._aio.client import Client
from dorad._channel import Budget
from dorad._pool import Pool
from dorad._pool_server import Server, gather
from dorad._retry import Attempts
from dorad.errors import DoradError, NotFound, PermissionDenied, PoolError, Unavailable
from dorad.fleet.manifest_store import ManifestStore
from dorad.fleet.watched import WatchedServers
from dorad.gateway.answers import Answers
from dorad.gateway.rl.names import server_ref, shown_spans, shown_version
from dorad.gateway.rl.options import RlOptions

T = TypeVar("T")
S = TypeVar("S", t.Sample, t.Delta)
Metadata = tuple[tuple[str, str], ...]

_ASK_SECONDS = 5.0  # For a question to every server: one that hangs delays the answer.
_LACKING_SECONDS = 10.0  # A server may get the adapter meanwhile.
_LACKING_MOST = 4096  # Callers name the adapters, so the number must be bounded.
_POLICY_SECONDS = 10.0  # Another gateway may load the adapter with another policy.
_POLICY_TAG = "in_flight_policy"


class Servers(WatchedServers):
    """The pool of the gateway: servers of one model, each with adapters of its own.

    A server without the adapter of a request is passed over. Use it from one event loop.

    Args:
      rl: adapters have any names, requests wait while the servers are full or paused, and follow
        the active version by its policy.
      store: the manifest of a fleet in place of `targets`; not with `rl`.
    """

    def __init__(
        self,
        targets: Iterable[str],
        connect: Callable[[str], Client],
        rl: RlOptions | None = None,
        store: ManifestStore | None = None,
    ) -> None:
        super().__init__(targets, connect, store)
        self.rl = rl
        # By the adapter's name on the servers, while they are in use.
        self._changes: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        # In-flight policies by the adapter's name on the servers.
        self._policies: Answers[str, str] = Answers(seconds=_POLICY_SECONDS, most=_LACKING_MOST)
        self._lacking: OrderedDict[tuple[str, str], float] = OrderedDict()

    def of(self, metadata: Metadata | None = None) -> Calls:
        """Calls that carry `metadata`. None: the gateway's own calls."""
        return Calls(self, metadata)

    def _lacks(self, server: Server, adapter: str) -> None:
        self._lacking[server.target, adapter] = time.monotonic() + _LACKING_SECONDS
        self._lacking.move_to_end((server.target, adapter))
        if len(self._lacking) > _LACKING_MOST:
            self._lacking.popitem(last=False)

    @property
    def _members(self) -> dict[str, Server]:
        """The servers of the model, by target."""
        return {target: s for target, s in self._servers.items() if s.state != "stale"}

    @contextlib.asynccontextmanager
    async def _changing(self, adapter: str) -> AsyncIterator[None]:
        """A block that excludes other changes of the adapter through this gateway."""
        lock = self._changes.get(adapter) or self._changes.setdefault(adapter, asyncio.Lock())
        async with lock:
            try:
                yield
            finally:  # What was known of it before.
                self._policies.forget(adapter)
                for target in self.targets:
                    self._lacking.pop((target, adapter), None)

    def _choose(self, able: list[Server], adapter: str, home: bytes) -> Server:
        now = time.monotonic()
        have = [s for s in able if self._lacking.get((s.target, adapter), 0.0) <= now]
        return super()._choose(have or able, adapter, home)


class Calls:
    """One caller's calls. Each goes to the server that `Servers` chooses.

    The methods are those of `dorad.aio.Client`, where they are described. A failed call is repeated
    on other servers, but not after the first token of a stream.
    """

    def __init__(self, servers: Servers, metadata: Metadata | None) -> None:
        self._servers = servers
        self._metadata = metadata

    def _client(self, server: Server) -> Client:
        if self._metadata is None:
            return server.client
        return server.client.with_metadata(self._metadata)

    def _ref(self, ref: str) -> str:
        """The servers' reference to an adapter."""
        return ref if self._servers.rl is None else server_ref(ref)

    async def _for_server(self, options: t.GenerateOptions) -> t.GenerateOptions:
        rl, adapter = self._servers.rl, options.get("adapter")
        if rl is None or not adapter:
            return options
        found: t.GenerateOptions = {**options, "adapter": self._ref(adapter)}
        if found.get("in_flight_policy") is None and "@" not in adapter:
            found["in_flight_policy"] = await self._policy(adapter, rl)
        return found

    def _attempts(self, timeout: float) -> Attempts:
        return Attempts(Budget(timeout), 0.0 if self._servers.rl is None else timeout)

    async def _once(
        self, adapter: str, timeout: float, work: Callable[[Client, float | None], Awaitable[T]]
    ) -> T:
        attempts = Attempts(Budget(timeout), 0.0)

        async def one(server: Server, others: bool) -> T:
            with server.working():
                return await work(self._client(server), attempts.budget.left)

        found, _ = await self._servers._run(adapter, attempts, one)
        return found

    async def info(self, *, timeout: float) -> t.ServerInfo:
        return await self._once("", timeout, lambda client, left: client.info(timeout=left))

    async def score(
        self, sequences: Sequence[t.TokenIds], adapters: Sequence[str | None], *, timeout: float,
        **options: Any,
    ) -> t.ScoreResult:  # fmt: skip
        named = [adapter and self._ref(adapter) for adapter in adapters]

        async def ask(refs: Sequence[str | None]) -> t.ScoreResult:
            return await self._once(
                next((ref for ref in named if ref), ""),
                timeout,
                lambda client, left: client.score(sequences, refs, timeout=left, **options),
            )

        found = await self._servers.with_versions(named, ask)
        if self._servers.rl is None:
            return found
        return dataclasses.replace(found, versions=shown_spans(found.versions))

    async def generate(
        self, token_ids: t.TokenIds, *, timeout: float, **options: Unpack[t.GenerateOptions]
    ) -> list[t.Sample]:
        request = t.GenerateRequest(token_ids, **await self._for_server(options))
        attempts = self._attempts(timeout)

        async def ask(refs: Sequence[str | None]) -> list[t.Sample]:
            addressed = dataclasses.replace(request, adapter=refs[0])

            async def one(server: Server, others: bool) -> list[t.Sample]:
                client = self._client(server)
                once = client._attempts(attempts.budget.left, 0.0)
                with server.working():
                    # Samples that the server's end cuts short are repeated elsewhere if possible.
                    return await client._generate(addressed, once, client._calls, complete=others)

            home = _routing.home_key(request.adapter or "", token_ids)
            samples, _ = await self._servers._run(request.adapter or "", attempts, one, home)
            return samples

        samples = await self._servers.with_versions([request.adapter], ask)
        return [self._shown(sample) for sample in samples]

    def _shown(self, new: S) -> S:
        """A sample or delta with the names that callers use."""
        if self._servers.rl is None or not new.spans:
            return new
        return dataclasses.replace(new, spans=shown_spans(new.spans))

    def stream(
        self, token_ids: t.TokenIds, *, timeout: float, **options: Unpack[t.GenerateOptions]
    ) -> _Deltas:
        return _Deltas(self._deltas(token_ids, timeout, options))

    async def _deltas(
        self, token_ids: t.TokenIds, timeout: float, options: t.GenerateOptions
    ) -> AsyncGenerator[t.Delta]:
        options = await self._for_server(options)
        attempts = self._attempts(timeout)

        async with contextlib.AsyncExitStack() as held:
            adapter = options.get("adapter") or ""
            home = _routing.home_key(adapter, token_ids)

            async def ask(refs: Sequence[str | None]) -> tuple[tuple[Any, t.Delta | None], Server]:
                addressed: t.GenerateOptions = {**options, "adapter": refs[0]}

                async def begin(server: Server, others: bool) -> tuple[Any, t.Delta | None]:
                    async with contextlib.AsyncExitStack() as attempt:
                        attempt.enter_context(server.working())
                        client = self._client(server)
                        left = attempts.budget.left
                        stream = client.stream(token_ids, timeout=left, **addressed)
                        await attempt.enter_async_context(stream)
                        first = await anext(stream, None)
                        if others and _was_aborted(first):
                            await client._check_serving()
                        held.push_async_exit(attempt.pop_all())
                        return stream, first

                return await self._servers._run(adapter, attempts, begin, home)

            asked = self._servers.with_versions([options.get("adapter")], ask)
            (stream, first), server = await asked
            if first is None:
                return
            yield self._shown(first)
            try:
                async for delta in stream:
                    yield self._shown(delta)
            except Unavailable as error:
                server.state = "unavailable"
                server.lost += 1
                if error.reason:
                    raise
                message = f"the server was lost in the middle of the answer: {error.message}"
                raise Unavailable(message, code=error.code, reason="SERVER_LOST") from None

    # --- Questions to every server ----------------------------------------------------------------

    async def _all(self, ask: Callable[[Client], Awaitable[T]]) -> tuple[list[T], list[DoradError]]:
        """The answers and failures of the servers that requests go to now."""
        servers, tried, failed = self._servers, set[Server](), list[DoradError]()
        while able := servers._able(tried):
            tried.update(able)
            found, failures = await gather({s.target: ask(self._client(s)) for s in able})
            failed += failures.values()
            if found or any(not isinstance(error, Unavailable) for error in failures.values()):
                return list(found.values()), failed
        return [], failed or [Unavailable("no server is ready", code="UNAVAILABLE")]

    async def accepted_by_any(self) -> PermissionDenied | None:
        """Why every server refuses the caller. None: at least one accepts it."""
        found, failed = await self._all(lambda client: client.info(timeout=_ASK_SECONDS))
        if found:
            return None
        for error in failed:
            if isinstance(error, PermissionDenied):
                return error
        raise failed[0]

    async def adapter(self, ref: str) -> t.AdapterVersion:
        """If several servers have one: a ready one rather than another, the newest of those."""
        wanted = self._ref(ref)
        found, failed = await self._all(lambda client: client.adapter(wanted, timeout=_ASK_SECONDS))
        if not found:
            raise _main(failed)
        version = max(found, key=lambda v: (v.state == "ready", v.version))
        return version if self._servers.rl is None else shown_version(version)

    async def adapters(self, name: str | None = None) -> list[t.AdapterVersion]:
        """The versions of all servers. Of the active ones of a name only the newest is active."""
        wanted = name and self._ref(name)
        found, failed = await self._all(
            lambda client: client.adapters(wanted, timeout=_ASK_SECONDS)
        )
        if not found:
            raise _main(failed)
        versions: dict[tuple[str, int], t.AdapterVersion] = {}
        active: dict[str, int] = {}
        for version in (version for listed in found for version in listed):
            key = (version.name, version.version)
            if key not in versions or version.state == "ready":
                versions[key] = version
            if version.active:
                active[version.name] = max(active.get(version.name, 0), version.version)
        listed = [
            dataclasses.replace(version, active=active.get(name) == number)
            for (name, number), version in sorted(versions.items())
        ]
        return listed if self._servers.rl is None else [shown_version(v) for v in listed]

    # --- Changes of every server (--rl) -----------------------------------------------------------

    async def every(self, change: Callable[[Client], Awaitable[T]]) -> list[T]:
        """Changes all servers. Raises the failure of one."""
        members = self._servers._members
        found, failures = await gather({at: change(self._client(s)) for at, s in members.items()})
        if failures:
            raise _main(list(failures.values()))
        return list(found.values())

    async def load(
        self, name: str, *, timeout: float, policy: str | None, **options: Unpack[t.PublishOptions]
    ) -> t.AdapterVersion:
        """Publishes a version and makes it active on all servers or on none. Earlier versions are
        retired, except the one before.

        Args:
          policy: in-flight policy of later requests for the name. None: the gateway's.
        """
        name, members = self._ref(name), self._servers._members
        pool = Pool(members, lambda target: self._client(members[target]), timeout, 0.0)
        tags = {} if policy is None else {_POLICY_TAG: policy}
        async with self._servers._changing(name):
            try:
                version = await pool.publish(
                    name, True, timeout, {**options, "tags": tags, "keep_last": 1}
                )
            except PoolError as error:
                raise _main(list(error.failures.values()) or [error]) from None
        return shown_version(version)

    async def unload(self, name: str, *, timeout: float) -> None:
        """Retires all versions of a name on all servers. Requests that hold one go on.

        Raises NotFound.
        """
        wanted = self._ref(name)

        async def retire(client: Client) -> int:
            listed = await client.adapters(wanted, timeout=timeout)
            ready = [version for version in listed if version.state == "ready"]
            for version in ready:
                await client.retire(wanted, version.version, timeout=timeout)
            return len(ready)

        async with self._servers._changing(wanted):
            if not any(await self.every(retire)):
                message = f"there is no adapter {name!r}"
                raise NotFound(message, code="NOT_FOUND", reason="ADAPTER_NOT_FOUND")

    async def _policy(self, adapter: str, rl: RlOptions) -> t.InFlightPolicy:
        async def ask() -> str:
            return (await self.adapter(adapter)).tags.get(_POLICY_TAG, "")

        try:
            found = await self._servers._policies.get(self._ref(adapter), ask)
        except DoradError:  # The request itself will meet it.
            found = ""
        return cast(t.InFlightPolicy, found or rl.in_flight_policy)


def _was_aborted(delta: t.Delta | None) -> bool:
    finish = None if delta is None else delta.finish
    return finish is not None and finish.reason is t.FinishReason.ABORTED


def _main(failed: Sequence[DoradError]) -> DoradError:
    """A failure that may pass comes first: the server could have had the adapter."""
    return next((error for error in failed if error.retryable), failed[0])


class _Deltas:
    """A stream's deltas. Leaving its `async with` block ends the call."""

    def __init__(self, deltas: AsyncGenerator[t.Delta]) -> None:
        self._deltas = deltas

    def __aiter__(self) -> AsyncGenerator[t.Delta]:
        return self._deltas

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._deltas.aclose()
