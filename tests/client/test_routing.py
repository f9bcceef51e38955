"""Every call names its adapter in a header, so that proxies can choose a server by it."""

import asyncio
import inspect

import dorad
import dorad.aio
import numpy as np
import pytest
from fake_server import image_of

PROMPT = [1, 2]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    image = image_of({"w": np.zeros((3, 200_000))})
    (tmp_path / "adapter_model.safetensors").write_bytes(image)
    return tmp_path


def seen(server, kind, body):
    """The metadata of the calls of `body(call)`; `call` runs a method of the client."""

    async def run_aio():
        async with dorad.aio.Client(server.target, timeout=20) as client:

            async def call(method, *args, **options):
                result = getattr(client, method)(*args, **options)
                if inspect.isawaitable(result):
                    return await result
                return [item async for item in result]

            await body(call)

    async def run_sync():
        with dorad.Client(server.target, timeout=20) as client:

            async def call(method, *args, **options):
                result = getattr(client, method)(*args, **options)
                return list(result) if isinstance(result, dorad.Stream) else result

            await body(call)

    asyncio.run(asyncio.wait_for(run_aio() if kind == "aio" else run_sync(), 30))
    return server.routing.seen


@pytest.mark.parametrize("kind", ["sync", "aio"])
def test_calls_name_the_adapter_without_its_version(server, folder, kind):
    async def body(call):
        await call("publish", "a", path=folder)
        await call("generate", PROMPT, adapter="a", max_tokens=1)
        await call("stream", PROMPT, adapter="a@1", max_tokens=1)
        await call("generate_many", [PROMPT], adapter="a", max_tokens=1)
        await call("score", [PROMPT], ["a@1", "a"])
        await call("score", [PROMPT], [None, "a"])
        await call("abort", adapter="a@1")
        await call("adapter", "a@1")
        await call("adapters", "a")
        await call("activate", "a@1")
        await call("pause", adapter="a")
        await call("resume", "a")
        await call("retire", "a@1")

    told = seen(server, kind, body)
    assert len(told) == 13 and {name for _, name in told} == {"a"}, told


@pytest.mark.parametrize("kind", ["sync", "aio"])
def test_calls_about_no_adapter_name_none(server, kind):
    async def body(call):
        await call("generate", PROMPT, max_tokens=1)
        await call("score", [PROMPT])
        await call("abort", "some-id")
        await call("adapters")
        await call("info")
        await call("health")

    told = seen(server, kind, body)
    assert len(told) == 6 and {name for _, name in told} == {None}, told


@pytest.mark.parametrize("kind", ["sync", "aio"])
def test_an_upload_goes_on_at_the_server_that_has_it(server, folder, kind):
    server.break_uploads_at = [(1 << 20) + 1]

    async def body(call):
        await call("publish", "policy", path=folder)

    told = seen(server, kind, body)
    assert told == [("Publish", "policy"), ("GetUpload", "policy"), ("Publish", "policy")]


@pytest.mark.parametrize("name", ["ä", "a b", "a\nx", "A", "x" * 129, "../a", "-a"])
def test_what_is_no_name_is_left_to_the_server(server, name):
    """Such text could not be sent as a header, or would break the connection for others."""
    with dorad.Client(server.target, timeout=20) as client, pytest.raises(dorad.NotFound):
        client.generate(PROMPT, adapter=name)
    assert server.routing.seen == [("Generate", None)]
