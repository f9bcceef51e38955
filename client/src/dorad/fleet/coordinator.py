"""Publishes versions to a fleet, and finishes or undoes what another coordinator has left.

The manifest decides: a version that it has as committed is the fleet's, whatever the members have
at that moment; they follow. A coordinator may therefore stop anywhere. Any number of coordinators
may work at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dorad import types as t
from dorad._pool_server import conflict, gather
from dorad._routing import affinity
from dorad.errors import DoradError, InvalidArgument, NotFound, PoolError
from dorad.fleet import leaving
from dorad.fleet import manifest as m
from dorad.fleet.manifest_store import ManifestStore, change
from dorad.fleet.members import Held, Members
from dorad.fleet.relay import SOURCE, RelayTree

PEER_REASONS = frozenset({"PEER_UNAVAILABLE", "PUBLISH_SHA256_MISMATCH"})
"""Reasons of a receiver whose sender failed: another sender may do."""

LEASE_SECONDS = 30.0
"""Of members and prepared versions, unless a coordinator has another one."""

KEEPER_SECONDS = 3.0
"""After so long another coordinator repairs the members in place of one that has stopped."""


@dataclass(frozen=True)
class Outcome:
    """A committed publish."""

    release: m.Release
    active: Mapping[str, t.AdapterVersion]
    """Of the members that have it active."""
    behind: Mapping[str, DoradError]
    """Members that do not: they get no prompts until they are reconciled."""


def unknown(name: str) -> NotFound:
    """The error of a name without a committed version."""
    return NotFound(f"the fleet has no {name!r}", code="NOT_FOUND")


class Coordinator:
    """Changes a fleet. Use it from one event loop; any number may share a store.

    Args:
      lease: seconds for which a prepared version is this coordinator's, and a member a live one.
        Both are renewed while the coordinator runs.
      clock: seconds since 1970. The clocks of coordinators may differ by much less than `lease`.
    """

    def __init__(
        self,
        store: ManifestStore,
        members: Members,
        *,
        lease: float = LEASE_SECONDS,
        clock: Callable[[], float] = time.time,
        name: str | None = None,
    ) -> None:
        self._store = store
        self._members = members
        self._lease = lease
        self._clock = clock
        self.name = name or uuid.uuid4().hex
        self._repairs: dict[str, asyncio.Future[None]] = {}
        self._answered: set[str] = set()  # Members that answered since the last round.

    def _until(self) -> float:
        return self._clock() + self._lease

    # --- Publish ----------------------------------------------------------------------------------

    async def publish(
        self, name: str, files: m.Files, options: Mapping[str, Any] | None = None
    ) -> Outcome:
        """Publishes the files that `Members.send` uploads, and makes the version active.

        The version is committed when every live member has it or has failed, and more than half of
        all members have it.

        Raises:
          Lost: another coordinator publishes this name, or has taken over.
          InvalidArgument: the adapter is refused.
          PoolError: too few members have it.
        """
        await self._recover_if_left(name)
        manifest = await self._store.read()
        live = manifest.live(self._clock())
        held, down = await self._held(live, name)
        numbers = [version.version for versions in held.values() for version in versions]

        def prepare(manifest: m.Manifest) -> m.Manifest:
            highest = manifest.adapters.get(name, m.Adapter()).highest
            number = 1 + max([highest, *numbers])
            release = m.Release(number, files, uuid.uuid4().hex, dict(options or {}))
            return m.prepare(manifest, name, m.Prepared(release, self.name, self._until()))

        manifest = await change(self._store, prepare)
        prepared = manifest.adapters[name].prepared
        assert prepared is not None
        release = prepared.release
        try:
            async with self._holding(name, release):
                ready, failures = await self.spread(name, release, list(held))
            failures |= down
            digest = self._judge(name, release, manifest, ready, failures)
            await self._commit(name, release, digest)
        except BaseException:
            await self._undo(name, release, live)
            raise
        return await self._activate(name, release, digest, ready, failures)

    @contextlib.asynccontextmanager
    async def _holding(self, name: str, release: m.Release) -> AsyncIterator[None]:
        """Keeps the prepared version this coordinator's. Raises Lost if it is not any more."""
        lost: list[m.Lost] = []
        task = asyncio.current_task()
        assert task is not None

        async def hold() -> None:
            while True:
                await asyncio.sleep(self._lease / 3)
                try:
                    await change(
                        self._store,
                        lambda manifest: m.prolong(
                            manifest, name, release.version, self.name, self._until()
                        ),
                    )
                except m.Lost as error:
                    lost.append(error)
                    task.cancel()
                    return

        holding = asyncio.create_task(hold())
        try:
            yield
        except asyncio.CancelledError:
            if lost and not task.uncancel():
                raise lost[0] from None
            raise
        finally:
            holding.cancel()

    async def spread(
        self, name: str, release: m.Release, targets: Iterable[str], source: str = SOURCE
    ) -> tuple[dict[str, str], dict[str, DoradError]]:
        """Brings a release to all targets at the same time, along a tree.

        Returns the digest of each member that has it ready, and the errors of the others.
        """
        tree = RelayTree(targets, source)
        moved = {target: asyncio.Event() for target in targets}

        async def receive(target: str) -> str:
            bad: set[str] = set()
            while True:
                sender = tree.sender(target)
                moved[target].clear()
                try:
                    digest: str | None = await self._until_set(
                        moved[target],
                        self._members.send(target, name, release)
                        if sender == SOURCE
                        else self._members.fetch(target, name, release, sender),
                    )
                except DoradError as error:
                    if tree.sender(target) != sender:
                        continue
                    if sender != SOURCE and error.reason in PEER_REASONS:
                        bad.add(sender)
                        if tree.move(target, bad):
                            continue
                    for orphan in tree.fail(target):
                        moved[orphan].set()
                    raise
                if digest is not None:
                    return digest

        return await gather({target: receive(target) for target in targets})

    @staticmethod
    async def _until_set(event: asyncio.Event, work: Any) -> Any:
        """The result of `work`, or None when the event comes first: the work is cancelled."""
        working = asyncio.ensure_future(work)
        waiting = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            waiting.cancel()
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    def _judge(
        self,
        name: str,
        release: m.Release,
        manifest: m.Manifest,
        ready: Mapping[str, str],
        failures: Mapping[str, DoradError],
    ) -> str:
        """The digest to commit. Raises when the version must not become the fleet's."""
        ref = f"{name}@{release.version}"
        for error in failures.values():
            if isinstance(error, InvalidArgument) and error.reason not in PEER_REASONS:
                raise error
        if len(set(ready.values())) > 1:
            different = {at: conflict(f"{ref} is {digest}") for at, digest in ready.items()}
            raise PoolError(f"the members of the fleet compute differently: {ref}", different)
        if 2 * len(ready) <= len(manifest.members):
            raise PoolError(
                f"{ref} is on {len(ready)} of {len(manifest.members)} members, not on more than"
                " half of them",
                dict(failures),
            )
        return next(iter(ready.values()))

    async def _commit(self, name: str, release: m.Release, digest: str) -> None:
        await change(
            self._store,
            lambda manifest: m.commit(manifest, name, release.version, self.name, digest),
        )

    async def _activate(
        self,
        name: str,
        release: m.Release,
        digest: str,
        ready: Iterable[str],
        failures: Mapping[str, DoradError],
    ) -> Outcome:
        release = dataclasses.replace(release, digest=digest)
        done, late = await gather(
            {target: self._members.activate(target, name, release) for target in ready}
        )
        return Outcome(release, done, {**failures, **late})

    async def _undo(self, name: str, release: m.Release, targets: Iterable[str]) -> None:
        """Aborts a prepared release, unless another coordinator has decided on it."""
        try:
            await change(
                self._store,
                lambda manifest: m.abort(manifest, name, release.version, self.name),
            )
        except m.Lost:
            return
        # A member that does not answer has it ready, but unused, until it is reconciled.
        await gather(
            {target: self._members.retire(target, name, release.version) for target in targets}
        )

    # --- Repair -----------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Finishes or undoes every release whose coordinator has stopped."""
        for name in (await self._store.read()).adapters:
            await self._recover_if_left(name)

    async def _recover_if_left(self, name: str) -> None:
        prepared = (await self._store.read()).adapters.get(name, m.Adapter()).prepared
        if prepared is None or prepared.until > self._clock():
            return
        release = prepared.release
        with contextlib.suppress(m.Lost):  # The other coordinator works on it.
            manifest = await change(
                self._store,
                lambda manifest: m.take_over(
                    manifest, name, release.version, self.name, self._clock(), self._until()
                ),
            )
            live = manifest.live(self._clock())
            try:
                held, failures = await self._held(live, name)
                ready = {
                    target: version.digest
                    for target, versions in held.items()
                    for version in versions
                    if version.version == release.version and version.ready
                }
                digest = ""
                if len(ready) == len(held):
                    with contextlib.suppress(PoolError):
                        digest = self._judge(name, release, manifest, ready, {})
                if digest:
                    await self._commit(name, release, digest)
            except BaseException:
                await self._undo(name, release, live)
                raise
            if digest:
                await self._activate(name, release, digest, ready, failures)
            else:
                await self._undo(name, release, live)

    async def reconcile(self, target: str) -> None:
        """Brings a member to the manifest's versions, from other members.

        Raises the DoradError that prevents it: the member must get no prompts.
        """
        manifest = await self._store.read()
        held = {(h.name, h.version): h for h in await self._members.held(target, None)}
        self._answered.add(target)
        for name, release in manifest.committed().items():
            await self._bring(target, name, release, held, manifest)
        for (name, version), has in held.items():
            if has.ready and self._is_left_over(manifest, name, version):
                await self._members.retire(target, name, version)

    @staticmethod
    def _is_left_over(manifest: m.Manifest, name: str, version: int) -> bool:
        """Whether a version was prepared and then given up."""
        adapter = manifest.adapters.get(name)
        if adapter is None or version > adapter.highest:
            return False
        if adapter.prepared is not None and adapter.prepared.release.version == version:
            return False
        return adapter.committed is None or version > adapter.committed.version

    async def _bring(
        self,
        target: str,
        name: str,
        release: m.Release,
        held: Mapping[tuple[str, int], Held],
        manifest: m.Manifest,
    ) -> None:
        has = held.get((name, release.version))
        if has is not None and has.loading:  # From another keeper. A later round looks again.
            raise conflict(f"{target} loads {name}@{release.version}")
        if has is None or not has.ready:
            if has is not None:  # Damaged on its disk: a whole copy takes its place.
                with contextlib.suppress(DoradError):
                    await self._members.retire(target, name, release.version)
            digest = await self._fetch_from_any(target, name, release, manifest)
        else:
            digest = has.digest
        if digest != release.digest:
            raise conflict(f"{target} has {name}@{release.version} as {digest}")
        if has is None or not has.active:
            await self._members.activate(target, name, release)

    async def _fetch_from_any(
        self, target: str, name: str, release: m.Release, manifest: m.Manifest
    ) -> str:
        ref = f"{name}@{release.version}"
        if not release.options.get("durable"):
            raise NotFound(f"no member has kept the files of {ref}", code="NOT_FOUND")
        failure: DoradError = NotFound(f"no live member has {ref}", code="NOT_FOUND")
        # The publish's id would be answered by its result: an error, or a version that has gone.
        release = dataclasses.replace(release, upload_id=uuid.uuid4().hex)
        senders = [sender for sender in manifest.live(self._clock()) if sender != target]
        # Each member has another order, so that several do not ask the same one.
        for sender in sorted(senders, key=lambda sender: affinity(sender, target.encode()[-64:])):
            found, _ = await self._held([sender], name)
            if not any(h.version == release.version and h.ready for h in found.get(sender, ())):
                continue  # The target would wait for its arrival there.
            try:
                return await self._members.fetch(target, name, release, sender)
            except DoradError as error:
                failure = error
                if error.reason not in PEER_REASONS:
                    break
        raise failure

    async def tend(self) -> dict[str, DoradError | None]:
        """Recovers what was left, repairs members and renews the leases of those that answer.

        Returns, for each member, why it must get no prompts; None: it has the fleet's versions.
        Empty while another coordinator does this. Call it about once a second.
        """
        if not await self._is_keeper():
            return {}
        with contextlib.suppress(DoradError):  # A later call tries again.
            await self.recover()
        members = (await self._store.read()).members
        for target in members:
            if target not in self._repairs:
                self._repairs[target] = asyncio.ensure_future(self.reconcile(target))
        if self._repairs:  # A slow one must not cost the others their leases.
            await asyncio.wait(self._repairs.values(), timeout=KEEPER_SECONDS / 3)
        reasons = {target: self._reason(target) for target in list(self._repairs)}
        late = self._clock() + self._lease / 2
        renewed = {target for target in self._answered if members.get(target, late) < late}
        self._answered.clear()
        if renewed:
            await change(
                self._store,
                lambda manifest: m.renew(
                    manifest, renewed & manifest.members.keys(), self._until()
                ),
            )
        return {target: reasons.get(target) for target in members}

    def _reason(self, target: str) -> DoradError | None:
        """Of the last reconciliation, which another one follows."""
        repair = self._repairs[target]
        if not repair.done():
            return conflict(f"{target} gets the fleet's versions")
        del self._repairs[target]
        error = repair.exception()
        if error is not None and not isinstance(error, DoradError):
            raise error
        return error

    async def _is_keeper(self) -> bool:
        """Whether this coordinator repairs members. Takes the place of one that has stopped."""
        keeper, now = (await self._store.read()).keeper, self._clock()
        if keeper.coordinator == self.name and keeper.until > now + KEEPER_SECONDS / 2:
            return True
        try:
            await change(
                self._store,
                lambda manifest: m.keep(
                    manifest, self.name, self._clock(), self._clock() + KEEPER_SECONDS
                ),
            )
        except m.Lost:
            return False
        return True

    async def close(self) -> None:
        """Ends the repairs. Another coordinator takes them up."""
        for repair in self._repairs.values():
            repair.cancel()
        await asyncio.gather(*self._repairs.values(), return_exceptions=True)
        self._repairs.clear()

    # --- The rest ---------------------------------------------------------------------------------

    async def join(self, targets: Iterable[str]) -> None:
        """Adds members, or renews their leases."""
        targets = list(targets)
        await change(self._store, lambda manifest: m.renew(manifest, targets, self._until()))

    async def leave(self, target: str, *, force: bool = False) -> None:
        """As `leaving.leave`."""
        await leaving.leave(self._store, self._members, self.tend, target, force=force)

    async def spare(self, targets: Collection[str]) -> None:
        """As `leaving.spare`."""
        await leaving.spare(self._store, self._members, self.tend, targets)

    async def retire(self, name: str) -> None:
        """Takes a name's committed version back, everywhere. Raises NotFound."""
        manifest = await self._store.read()
        committed = manifest.committed().get(name)
        if committed is None:
            raise unknown(name)
        number = committed.version
        await change(self._store, lambda manifest: m.retire(manifest, name, number))
        await gather(
            {
                target: self._members.retire(target, name, number)
                for target in manifest.live(self._clock())
            }
        )

    async def _held(
        self, targets: Iterable[str], name: str
    ) -> tuple[dict[str, Sequence[Held]], dict[str, DoradError]]:
        return await gather({target: self._members.held(target, name) for target in targets})
