"""The asyncio form of `dorad.ray`."""

from dorad._aio.ray_fleet import Fleet

__all__ = ["Fleet"]
