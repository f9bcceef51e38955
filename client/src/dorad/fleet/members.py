"""The servers of a fleet, as its coordinator sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dorad import types as t
from dorad.fleet import manifest as m


@dataclass(frozen=True)
class Held:
    """A version that a member has."""

    name: str
    version: int
    digest: str
    ready: bool
    active: bool
    loading: bool = False
    """It may become ready."""


class Members(Protocol):
    """The servers of a fleet. Calls raise DoradError."""

    async def held(self, target: str, name: str | None) -> Sequence[Held]:
        """The versions of one name, or all."""

    async def send(self, target: str, name: str, release: m.Release) -> str:
        """Uploads the release from here. Returns the digest of its content once it is ready."""

    async def fetch(self, target: str, name: str, release: m.Release, sender: str) -> str:
        """Makes `target` take the release from another member. Returns as `send`."""

    async def activate(self, target: str, name: str, release: m.Release) -> t.AdapterVersion:
        """Idempotent."""

    async def retire(self, target: str, name: str, version: int) -> None: ...
