"""The asyncio client: the methods of `dorad.Client`, awaited.

    async with dorad.aio.Client("127.0.0.1:50051") as client:
        samples = await client.generate([1, 2, 3], n=4, max_tokens=64)
        async with client.stream([1, 2, 3]) as stream:
            async for delta in stream:
                ...

`RolloutPool` and `Fleet` combine several servers.
"""

from dorad._aio.client import Client
from dorad._aio.fleet import Fleet
from dorad._aio.pool import RolloutPool
from dorad._aio.stream import Stream

__all__ = ["Client", "Fleet", "RolloutPool", "Stream"]
