"""A fault to plant."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One wrong edit."""

    name: str
    file: str
    old: str
    """Occurs exactly once in the file."""
    new: str
    breaks: str
    """The harm to a user, in one sentence."""
    units: tuple[str, ...] = ()
    """Unit programs: "engine" is build/tests/unit/engine_test; "engine:KvPages.*" first runs these
    tests of it, then all. "emulation_linear" needs the headers of CUDA."""
    tests: tuple[str, ...] = ()
    """Selections of pytest, below tests/; they run if the unit programs catch nothing."""
