"""The demo's cache folder: .cache in the repository, or DORAD_CACHE."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("DORAD_CACHE", ROOT / ".cache"))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time makes `path`; the others wait and find it made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f".{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
