"""The coordinator's calls, to real servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from dorad import types as t
from dorad._aio.client import Client
from dorad._channel import PROBE_SECONDS, Budget
from dorad._publish import Upload
from dorad._retry import Attempts, UploadAttempts
from dorad.errors import Overloaded
from dorad.fleet import manifest as m
from dorad.fleet.members import Held

_BUSY_SECONDS = 60.0
"""Patience with a member that has no place for a transfer."""


class ServerCalls:
    """`Members` of a coordinator. `client` gives the client of a target."""

    def __init__(self, client: Callable[[str], Client]) -> None:
        self._client = client
        self.sources: dict[m.Files, Upload] = {}
        """The adapters that this process can send."""

    async def held(self, target: str, name: str | None) -> Sequence[Held]:
        found = await self._client(target).adapters(name, timeout=PROBE_SECONDS, retry_for=0)
        return [
            Held(v.name, v.version, v.digest, v.state == "ready", v.active, v.state == "loading")
            for v in found
        ]

    async def send(self, target: str, name: str, release: m.Release) -> str:
        client = self._client(target)
        upload = self.sources[release.files].again(
            {
                "name": name,
                "version": release.version,
                "upload_id": release.upload_id,
                **release.options,
            }
        )
        attempts = UploadAttempts(Budget(None), PROBE_SECONDS, size=upload.size)
        attempts.again = True  # The member may have some of it from another one.
        answer = await client._upload(upload, attempts)
        return str(answer.adapter.digest)

    async def fetch(self, target: str, name: str, release: m.Release, sender: str) -> str:
        client = self._client(target)
        patience = Attempts(Budget(None), _BUSY_SECONDS)
        while True:
            try:
                version = await client.publish_from_peer(
                    name,
                    release.version,
                    peer=self._client(sender)._admin_target,
                    upload_id=release.upload_id,
                    config_sha256=release.files.config_sha256,
                    tensors_sha256=release.files.tensors_sha256,
                    size=release.files.size,
                    timeout=float("inf"),
                    retry_for=0,
                    **release.options,
                )
            except Overloaded as error:
                delay = patience.delay(error)
                if delay is None:
                    raise
                await asyncio.sleep(delay)
            else:
                return version.digest

    async def activate(self, target: str, name: str, release: m.Release) -> t.AdapterVersion:
        ref = f"{name}@{release.version}:{release.digest}"
        answer = await self._client(target).activate(ref, timeout=PROBE_SECONDS, retry_for=0)
        return answer.adapter

    async def retire(self, target: str, name: str, version: int) -> None:
        await self._client(target).retire(name, version, timeout=PROBE_SECONDS, retry_for=0)
