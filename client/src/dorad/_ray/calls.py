"""Calls to a fleet's actor. Their failures become DoradErrors."""

from __future__ import annotations

from typing import Any

from ray.exceptions import RayError, RayTaskError

from dorad._pool_server import unavailable
from dorad.errors import DoradError, Unavailable
from dorad.fleet.manifest import Manifest


async def answer(reference: Any) -> Any:
    """The result of a call."""
    try:
        return await reference
    except RayTaskError as error:
        if isinstance(error.cause, DoradError):
            raise error.cause from None
        raise
    except RayError as error:
        raise unavailable(f"the fleet's actor does not answer: {error}") from None


class ActorManifest:
    """A manifest that a fleet's actor keeps, for coordinators on any host."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def read(self) -> Manifest:
        read = self._actor.read.options(max_task_retries=-1)  # Ray may be restarting it.
        manifest: Manifest = await answer(read.remote())
        return manifest

    async def compare_and_set(self, expected: int, manifest: Manifest) -> bool:
        while True:
            try:
                replaced: bool = await answer(
                    self._actor.compare_and_set.remote(expected, manifest)
                )
            except Unavailable:
                # The actor has died in the call: it may have written the manifest before.
                now = await self.read()
                if now == manifest:
                    return True
                if now.generation != expected:
                    raise
            else:
                return replaced
