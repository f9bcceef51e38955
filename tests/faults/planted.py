"""Faults as a tired engineer would make them. Each one breaks a promise to a user. `plant.py`
plants them one at a time and shows which tests catch them."""

from __future__ import annotations

from faults.client_faults import CLIENT, FLEET, GATEWAY, POOL
from faults.compute_faults import CPU, ENGINE, KERNELS
from faults.server_faults import (
    ADAPTER,
    APP,
    COLOCATION,
    MODEL,
    PLATFORM,
    RPC,
    SECURITY,
)

FAULTS = [
    *CLIENT,
    *POOL,
    *FLEET,
    *GATEWAY,
    *SECURITY,
    *COLOCATION,
    *ENGINE,
    *CPU,
    *RPC,
    *PLATFORM,
    *ADAPTER,
    *MODEL,
    *APP,
    *KERNELS,
]
