"""memory.vram_limit: what does not fit is refused with the reasons, and the rest goes on."""

import subprocess

import grpc
import pytest
from lib.server import Server, command, device, environment, serve
from lib.wire import failure

pytestmark = pytest.mark.skipif(device() != "cuda", reason="the limit is a GPU's")

PROMPT = list(range(10, 50))
SMALL = {"engine.kv_bytes": 16 << 20, "engine.max_step_tokens": 64}


def test_a_start_that_cannot_fit_lists_what_it_needs(zoo) -> None:
    line = command(zoo.model("llama2"), settings=SMALL | {"memory.vram_limit": "8MiB"})
    run = subprocess.run(line, capture_output=True, text=True, timeout=60, env=environment())
    assert run.returncode == 78
    for part in ("GPU memory are needed", "weights", "kv 0.02 GB", "vram_limit is 0.01 GB", "free"):
        assert part in run.stderr, run.stderr


def tokens(server: Server, adapter: str) -> list[int]:
    return server.wire.generate(PROMPT, adapter=adapter, max_tokens=8, seed=1)[0].tokens


def test_an_adapter_too_many_is_refused_and_the_others_serve_on(zoo) -> None:
    adapter = zoo.adapter("llama2", "dora_r96")
    with serve(zoo.model("llama2"), settings=SMALL) as server:
        server.wire.publish("a", adapter, activate=True)
        held = sum(server.wire.info().memory_bytes.values())
    settings = SMALL | {"memory.vram_limit": held + (8 << 20)}
    with serve(zoo.model("llama2"), settings=settings) as server:
        first = server.wire.publish("a", adapter, activate=True).adapter
        expected = tokens(server, "a")
        # How many fit depends on what graphs happen to take.
        for _ in range(200):
            try:
                server.wire.publish("a", adapter)
            except grpc.RpcError as error:
                refused = failure(error)
                break
        else:
            raise AssertionError("the limit was never reached")
        assert refused.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refused.reason == "OUT_OF_MEMORY"
        assert "vram_limit" in refused.message and "weights" in refused.message
        assert tokens(server, f"a@{first.version}") == expected
        # What is given back can be used again.
        server.wire.retire("a", first.version + 1)
        later = server.wire.publish("a", adapter, activate=True).adapter
        assert tokens(server, f"a@{later.version}") == expected
