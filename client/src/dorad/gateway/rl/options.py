"""What `--rl` adds to a gateway."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dorad import types as t


@dataclass(frozen=True, slots=True)
class RlOptions:
    adapter_roots: tuple[Path, ...] = ()
    """Folders below which adapters may lie. (): no adapter is loaded from a path."""
    in_flight_policy: t.InFlightPolicy = "switch_keep_kv"
    """Of requests that name an adapter without a version, unless they or its load say otherwise."""
