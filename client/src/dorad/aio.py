"""The asyncio client: the methods of `dorad.Client`, awaited.

    async with dorad.aio.Client("127.0.0.1:50051") as client:
        samples = await client.generate([1, 2, 3], n=4, max_tokens=64)
        async with client.stream([1, 2, 3]) as stream:
            async for delta in stream:
                ...

Arguments, results and errors are those of the synchronous client, whose docstrings describe them.
`RolloutPool` makes one of several servers.
"""

from dorad._aio_client import Client
from dorad._aio_stream import Stream
from dorad._pool import RolloutPool

__all__ = ["Client", "RolloutPool", "Stream"]
