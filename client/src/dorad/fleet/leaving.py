"""Members leave a fleet, and no version with them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from dorad._pool_server import conflict, gather
from dorad.errors import DoradError, PoolError
from dorad.fleet import manifest as m
from dorad.fleet.manifest_store import ManifestStore, change
from dorad.fleet.members import Members

_ROUND_SECONDS = 0.2

Tend = Callable[[], Coroutine[Any, Any, object]]
"""One round of repairs: `Coordinator.tend`."""


async def leave(
    store: ManifestStore, members: Members, tend: Tend, target: str, *, force: bool
) -> None:
    """Removes a member. Before, others get the fleet's versions that it alone has.

    `force`: it leaves at once, also with the only copy.

    Raises Lost when it is no member, and what `spare` raises.
    """
    while True:
        before = await store.read()
        m.leave(before, target)
        if not force:
            await spare(store, members, tend, [target])
        looked_at = None if force else before
        with contextlib.suppress(_Changed):
            await change(store, functools.partial(_without, target=target, looked_at=looked_at))
            return


class _Changed(Exception):
    """There are other members or versions than those that were looked at."""


def _without(now: m.Manifest, target: str, looked_at: m.Manifest | None) -> m.Manifest:
    # Another holder of a version may have left meanwhile. Leases change all the time.
    if looked_at is not None and (now.members.keys(), now.committed()) != (
        looked_at.members.keys(),
        looked_at.committed(),
    ):
        raise _Changed
    return m.leave(now, target)


async def spare(
    store: ManifestStore, members: Members, tend: Tend, targets: Collection[str]
) -> None:
    """Waits until members other than `targets` have every version of the fleet.

    Raises PoolError, with the reason for each version that they lack and cannot get.
    """
    while True:
        manifest = await store.read()
        held, _ = await gather({at: members.held(at, None) for at in manifest.members})
        has = {at: {(v.name, v.version, v.digest) for v in held[at] if v.ready} for at in held}
        others = has.keys() - set(targets)
        lost: dict[str, DoradError] = {}
        is_coming = False
        for name, release in manifest.committed().items():
            version = (name, release.version, release.digest)
            if any(version in has[at] for at in others):
                continue
            if not any(version in found for found in has.values()):
                reason = "no member that answers has it"
            elif not release.options.get("durable"):
                reason = "no member has kept its files"
            elif not others:
                reason = "no other member answers"
            else:
                is_coming = True
                continue
            lost[f"{name}@{release.version}"] = conflict(reason)
        if lost:
            going = ", ".join(sorted(targets))
            raise PoolError(f"the fleet would lose versions without {going}", lost)
        if not is_coming:
            return
        await tend()
        await asyncio.sleep(_ROUND_SECONDS)
