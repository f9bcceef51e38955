"""The asyncio client against the fake server: the same answers, and cancellation."""

import asyncio
import gc
import inspect

import dorad
import dorad.aio
import numpy as np
import pytest
from fake_server import image_of, overloaded
from lib.server import device, wait_until


def run(server, body, **options):
    async def main():
        async with dorad.aio.Client(server.target, timeout=20, **options) as client:
            return await body(client)

    return asyncio.run(asyncio.wait_for(main(), 30))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    image = image_of({"w": np.zeros((3, 200_000))})
    (tmp_path / "adapter_model.safetensors").write_bytes(image)
    return tmp_path


def test_metadata_can_be_that_of_one_caller_over_the_same_connection(server):
    async def body(client):
        ours = client.with_metadata([("x-who", "one")])
        await asyncio.gather(ours.generate([1], max_tokens=1), client.generate([2], max_tokens=1))

    run(server, body)
    with dorad.Client(server.target, metadata=[("x-who", "own")]) as client:
        client.with_metadata([]).generate([3], max_tokens=1)
        client.generate([4], max_tokens=1)
    seen = {
        int.from_bytes(call.prompt_token_ids, "little"): metadata.get("x-who")
        for call, metadata in zip(server.generate_calls, server.metadata, strict=True)
    }
    assert seen == {1: "one", 2: None, 3: None, 4: "own"}


def test_a_pool_publishes_what_a_client_does():
    """Not the options that the pool decides about itself, nor what is for one upload alone."""
    client = set(inspect.signature(dorad.Client.publish).parameters)
    pool = set(dorad.PublishOptions.__annotations__) | {"activate", "timeout"}
    assert client - pool == {"self", "name", "version", "expected_generation", "progress"}
    assert pool <= client


def test_generates_streams_and_scores(server):
    async def body(client):
        (sample,) = await client.generate([1, 2], max_tokens=3, logprobs="raw")
        assert sample.token_ids.tolist() == [3, 4, 5] and sample.logprobs.shape == (3,)
        tokens = [d.token_ids.tolist() async for d in client.stream([1, 2], max_tokens=3)]
        assert tokens == [[3], [4], [5]]
        result = await client.score([[1, 2, 3]])
        assert result[0][0].shape == (3,)

    run(server, body)


def test_publishes_and_manages_adapters(server, folder):
    async def body(client):
        seen = []
        first = await client.publish("a", path=folder, progress=lambda *at: seen.append(at))
        assert first.label == "a@1" and first.active and len(seen) == 3
        tensors = {"w": np.ones((2, 2), np.float32)}
        second = await client.publish("a", tensors=tensors, config={}, activate=False)
        assert (await client.publish("b", path="/b", server_side=True)).label == "b@1"
        with pytest.raises(ValueError, match="absolute"):
            await client.publish("b", path="b", server_side=True)
        assert (await client.activate("a", 2)).previous_version == 1
        assert (await client.adapter("a")).version == second.version
        server.page_size = 1
        assert [v.label for v in await client.adapters()] == ["a@1", "a@2", "b@1"]
        assert (await client.retire("a@1")).state == "retiring"
        async with client.watch(0) as events:
            assert (await anext(events)).type == "published"
        assert await client.abort(all=True) == 3
        assert await client.limit_gpu_share(0.5, time_to_live=9, limit_id="a") == 0.5
        async with client.limited_gpu_share(0.25, time_to_live=0.15) as share:
            assert share == 0.25
            while len(server.gpu_share_requests) < 5:
                await asyncio.sleep(0.01)
        assert server.gpu_share_limits == {"a": 0.5}
        assert await client.end_gpu_share_limit("a") and not await client.end_gpu_share_limit("a")
        assert await client.sleep("kv") == {"kv": 1 << 20}
        await client.wake()
        assert await client.pause("keep") == 2
        await client.resume()
        assert (await client.info()).device == device()
        assert await client.health() == "serving"
        await client.wait_ready(5)

    run(server, body)


def test_a_refused_upload_says_why(server, folder):
    async def body(client):
        with pytest.raises(dorad.InvalidArgument) as caught:
            await client.publish("a/b", path=folder)
        assert caught.value.reason == "BAD_NAME"

        def explode(sent, total):
            raise RuntimeError("stop here")

        with pytest.raises(RuntimeError, match="stop here"):
            await client.publish("a", path=folder, progress=explode)
        assert await client.adapters() == []

    run(server, body)


def test_resumes_a_broken_upload(server, folder):
    server.break_uploads_at, server.lose_answers = [1, (1 << 20) + 1], 1

    async def body(client):
        assert (await client.publish("a", path=folder)).version == 1
        assert [v.label for v in await client.adapters()] == ["a@1"]

    run(server, body)
    assert sum(server.chunk_sizes) == len(server.images["a", 1][1])
    assert len({begin.upload_id for begin in server.publish_begins}) == 1


def test_leaving_a_stream_cancels_it_on_the_server(server):
    server.endless, server.token_delay = True, 0.005

    async def body(client):
        async with client.stream([1]) as stream:
            await anext(stream)
        assert [d async for d in stream] == []
        await asyncio.to_thread(wait_until, lambda: server.cancelled == 1)

    run(server, body)
    assert server.cancelled == 1


def test_dropping_a_stream_cancels_it_on_the_server(server):
    server.endless, server.token_delay = True, 0.005

    async def body(client):
        async for _ in client.stream([1]):
            break
        gc.collect()
        await asyncio.to_thread(wait_until, lambda: server.cancelled == 1)

    run(server, body)


def test_closing_from_another_task_ends_the_iteration(server):
    server.endless, server.token_delay = True, 0.005

    async def body(client):
        stream = client.stream([1])
        asyncio.get_running_loop().call_later(0.1, stream.close)
        return [d async for d in stream]

    assert run(server, body)


def test_cancelling_the_task_cancels_the_request(server):
    server.endless = True

    async def body(client):
        task = asyncio.create_task(client.generate([1]))
        await asyncio.to_thread(wait_until, lambda: server.running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(wait_until, lambda: server.running == 0)

    run(server, body)


def test_many_keeps_order_bounds_concurrency_and_waits_for_room(server):
    server.token_delay, server.capacity = 0.002, 4

    async def body(client):
        results = await client.generate_many([[i] for i in range(40)], concurrency=6, max_tokens=2)
        assert [r[0].token_ids[0] for r in results] == list(range(40))
        assert 2 <= server.most_running <= 4

    run(server, body)
    assert len(server.generate_calls) > 40


def test_many_cancels_the_rest_on_an_error_or_returns_it(server):
    async def body(client):
        results = await client.generate_many([[1], []], return_errors=True, max_tokens=1)
        assert isinstance(results[1], dorad.InvalidArgument) and len(results[0]) == 1
        server.endless = True
        with pytest.raises(dorad.InvalidArgument):
            await client.generate_many([[1]] * 5 + [[]], concurrency=6)
        await asyncio.to_thread(wait_until, lambda: server.running == 0)

    run(server, body)


def test_retries_before_the_first_message(server):
    server.refuse_generate = [overloaded(retry_after=0.005)]
    run(server, lambda client: client.generate([1], max_tokens=1))
    assert len(server.generate_calls) == 2


def test_must_be_made_inside_a_loop():
    with pytest.raises(RuntimeError, match="no running event loop"):
        dorad.aio.Client("127.0.0.1:1")
