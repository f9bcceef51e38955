"""A fleet whose servers Ray places, restarts and finds. See docs/guides/ray.md.

    fleet = dorad.ray.Fleet("policy-servers", model="/models/base", gpus=1)
    fleet.scale(8)

`dorad.ray.aio.Fleet` is the same for asyncio. Needs the extra `ray`.
"""

from __future__ import annotations

try:
    import ray as _ray  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "ray":
        raise
    raise ImportError(
        "dorad.ray needs the package ray, which is not installed: pip install 'dorad[ray]'"
    ) from None

from dorad._ray.server_actor import ServerState
from dorad._sync.ray_fleet import Fleet

__all__ = ["Fleet", "ServerState"]
