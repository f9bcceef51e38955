"""Lets requests in, or holds or refuses them while the policy changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Knows the requests that are in. For the tasks of one event loop."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._closed = False
        self._refusing = False
        self._inside: list[str] = []

    @property
    def inside(self) -> list[str]:
        """The ids of the requests that are in."""
        return list(self._inside)

    @asynccontextmanager
    async def entered(self, request_id: str) -> AsyncIterator[bool]:
        """A request is in during the block. While the gate is closed it waits, or is refused: then
        this gives False."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._closed or self._refusing)
            refused = self._closed
            if not refused:
                self._inside.append(request_id)
        try:
            yield not refused
        finally:
            if not refused:
                async with self._changed:
                    self._inside.remove(request_id)
                    self._changed.notify_all()

    async def close(self, *, refuse: bool) -> None:
        """Holds new requests until `open`, or refuses them. The latest call counts."""
        async with self._changed:
            self._closed, self._refusing = True, refuse
            self._changed.notify_all()

    async def open(self) -> None:
        async with self._changed:
            self._closed = self._refusing = False
            self._changed.notify_all()

    async def emptied(self) -> None:
        """Returns when no request is in."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._inside)
