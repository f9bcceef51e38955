"""Where a fleet keeps its manifest. Every store has the same two operations.

`ManifestFile` is for the processes of one host: a JSON file, replaced as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator
from typing import Protocol

from dorad.fleet.manifest import Change, Manifest, from_json, to_json


class ManifestStore(Protocol):
    async def read(self) -> Manifest:
        """The newest manifest; an empty one at first."""

    async def compare_and_set(self, expected: int, manifest: Manifest) -> bool:
        """Replaces the manifest of generation `expected`. False: it has another generation.

        After True the new manifest survives any crash. When the call fails, either may be there.
        """


async def change(store: ManifestStore, how: Change) -> Manifest:
    """Applies a change to the newest manifest, again when another one comes first.

    Returns the manifest that the change has made. Raises what `how` raises.
    """
    while True:
        before = await store.read()
        after = how(before)
        if await store.compare_and_set(before.generation, after):
            return after


class ManifestFile:
    """A manifest in a file, for coordinators on one host. Processes and threads may share it.

    The file is written beside its place, synced and renamed: a crash leaves the old or the new
    manifest, whole. A lock file orders the writers.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = pathlib.Path(path)

    async def read(self) -> Manifest:
        return await asyncio.to_thread(self._read)

    async def compare_and_set(self, expected: int, manifest: Manifest) -> bool:
        return await asyncio.to_thread(self._compare_and_set, expected, manifest)

    def _read(self) -> Manifest:
        try:
            return from_json(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return Manifest()

    def _compare_and_set(self, expected: int, manifest: Manifest) -> bool:
        with self._locked():
            if self._read().generation != expected:
                return False
            replace_file(self._path, to_json(manifest).encode())
            return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # A file of its own: the manifest's is replaced, and a lock would stay with the old one.
        with open(f"{self._path}.lock", "a", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def replace_file(path: pathlib.Path, data: bytes) -> None:
    """Replaces a file as a whole, for good. One writer at a time."""
    fresh = f"{path}.new"  # What a crash left there is overwritten.
    with open(fresh, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
