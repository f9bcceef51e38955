"""What ends when an asyncio client is closed: its calls, not the tasks that wait for them."""

import asyncio

import dorad
import dorad.aio
import numpy as np
import pytest
from lib.server import wait_until

BIG = {f"t{i}": np.zeros(1 << 18, np.float32) for i in range(40)}


async def read(stream):
    return [delta async for delta in stream]


CALLS = {
    "generate": lambda client: client.generate([1]),
    "generate_many": lambda client: client.generate_many([[1]]),
    "stream": lambda client: read(client.stream([1])),
    "watch": lambda client: read(client.watch()),
    "info": lambda client: client.info(),
}


@pytest.mark.parametrize("kind", CALLS)
def test_closing_the_client_cancels_its_calls(server, kind):
    server.endless = server.hang_info = True

    async def body():
        client = dorad.aio.Client(server.target)
        call = asyncio.create_task(CALLS[kind](client))
        await asyncio.to_thread(wait_until, lambda: len(server.routing.seen) == 1)
        await asyncio.sleep(0.1)
        await client.close()
        with pytest.raises(dorad.Cancelled, match="closed"):
            await asyncio.wait_for(call, 20)
        with pytest.raises(dorad.Cancelled, match="closed"):
            await CALLS[kind](client)

    try:
        asyncio.run(body())
    finally:
        server.hang_info = False


def test_cancelling_a_task_is_not_taken_for_a_closed_client(server):
    server.endless = server.hang_info = True

    async def body():
        async with dorad.aio.Client(server.target) as client:
            tasks = [asyncio.create_task(call(client)) for call in CALLS.values()]
            await asyncio.to_thread(wait_until, lambda: len(server.routing.seen) == len(CALLS))
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(result) for result in results} == {asyncio.CancelledError}

    try:
        asyncio.run(body())
    finally:
        server.hang_info = False


def test_closing_the_client_ends_its_uploads(server):
    async def body():
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()
        client = dorad.aio.Client(server.target)

        def slow(sent, total):
            loop.call_soon_threadsafe(begun.set)
            asyncio.run(asyncio.sleep(0.1))

        call = asyncio.create_task(
            client.publish("a", tensors=BIG, config={}, progress=slow, timeout=60)
        )
        await asyncio.wait_for(begun.wait(), 20)
        await client.close()
        with pytest.raises(dorad.Cancelled, match="closed"):
            await asyncio.wait_for(call, 20)
        with pytest.raises(dorad.Cancelled, match="closed"):
            await client.publish("b", tensors=BIG, config={})

    asyncio.run(body())
    assert server.versions == {}
