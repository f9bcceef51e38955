"""A GPU that others use, too: refusals are clean, what runs goes on, and memory changes hands."""

import subprocess
import threading

import grpc
import pytest
from lib.gpu_hog import gpu_hog
from lib.server import Server, command, device, environment, serve, wait_until
from lib.wire import Failure, failure

pytestmark = pytest.mark.skipif(device() != "cuda", reason="the memory is a GPU's")

PROMPT = list(range(10, 50))
SETTINGS = {"engine.kv_bytes": 64 << 20, "engine.max_step_tokens": 64}
LEFT = 64 << 20  # of the GPU, less than memory.reserve


def ask(server: Server, adapter: str, tokens: int = 8) -> list[int]:
    (sample,) = server.wire.generate(
        PROMPT, adapter=adapter, max_tokens=tokens, temperature=0.0, ignore_eos=True
    )
    return sample.tokens


def refusal(call, *args, **options) -> Failure:
    with pytest.raises(grpc.RpcError) as caught:
        call(*args, **options)
    return failure(caught.value)


class Streams:
    """Requests one after the other, all of which must be answered as the first was."""

    def __init__(self, server: Server, adapter: str) -> None:
        self.server, self.adapter = server, adapter
        self.expected = ask(server, adapter)
        self.answered = 0
        self.problems: list[object] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Streams":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(60)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                tokens = ask(self.server, self.adapter)
            except grpc.RpcError as error:
                self.problems.append(failure(error))
                return
            if tokens != self.expected:
                self.problems.append(tokens)
                return
            self.answered += 1


def test_publishes_are_refused_while_a_trainer_holds_the_gpu_and_streams_go_on(zoo) -> None:
    adapter = zoo.adapter("llama2", "dora_r96")
    with serve(zoo.model("llama2"), settings=SETTINGS) as server:
        server.wire.publish("a", adapter, activate=True, pinned=True)
        with Streams(server, "a") as adapted, Streams(server, "") as base:
            with gpu_hog(LEFT):
                before = adapted.answered, base.answered
                for _ in range(5):
                    refused = refusal(server.wire.publish, "b", adapter)
                    assert refused.code == grpc.StatusCode.RESOURCE_EXHAUSTED
                    assert refused.reason == "OUT_OF_MEMORY"
                    assert "memory.reserve" in refused.message and "need" in refused.message
                wait_until(
                    lambda: adapted.answered > before[0] + 3 and base.answered > before[1] + 3,
                    what="streams to go on",
                )
                free = server.metric("dorad_device_memory_free_bytes")
                assert free < server.metric("dorad_device_memory_bytes") / 10
                assert server.metric("dorad_device_memory_others_bytes") > 10 * free
            assert server.metric("dorad_memory_refusals_total", by="reserve") >= 5
            later = server.wire.publish("b", adapter, activate=True).adapter
        assert not adapted.problems and not base.problems
        assert ask(server, f"b@{later.version}") == adapted.expected


def test_idle_adapters_go_to_host_memory_when_others_need_the_gpu_and_come_back(zoo) -> None:
    adapter = zoo.adapter("llama2", "dora_r96")
    settings = SETTINGS | {"adapters.host_bytes": 64 << 20}
    with serve(zoo.model("llama2"), settings=settings) as server:
        for name in ("a", "b", "c"):
            server.wire.publish(name, adapter, activate=True)
        expected, base = ask(server, "a"), ask(server, "")
        assert server.metric("dorad_kv_pages_released") == 0
        with gpu_hog(LEFT):
            wait_until(
                lambda: server.metric("dorad_adapter_evicted_versions") == 3,
                what="idle adapters to go",
            )
            wait_until(
                lambda: server.metric("dorad_kv_pages_released") > 0, what="unused KV pages to go"
            )
            assert server.metric("dorad_memory_released_bytes_total", **{"from": "adapters"}) > 0
            assert server.metric("dorad_memory_released_bytes_total", **{"from": "kv"}) > 0
            assert ask(server, "") == base
        for name in ("a", "b", "c"):
            assert ask(server, name) == expected


def fill(server: Server, adapter) -> list[int]:
    """Publishes until it is refused; the versions."""
    versions: list[int] = []
    while len(versions) < 400:
        try:
            versions.append(server.wire.publish("many", adapter).adapter.version)
        except grpc.RpcError as error:
            assert failure(error).reason == "OUT_OF_MEMORY"
            return versions
    raise AssertionError("the limit was never reached")


def test_adapters_take_unused_kv_pages_and_requests_take_them_back(zoo) -> None:
    adapter = zoo.adapter("llama2", "dora_r96")
    # Steps that are large enough for many sequences to run, or pages would never be short.
    large = SETTINGS | {"engine.max_step_tokens": 2048}
    with serve(zoo.model("llama2"), settings=large) as server:
        server.wire.publish("a", adapter, activate=True)
        held = sum(server.wire.info().memory_bytes.values())
    settings = large | {"memory.vram_limit": held + (8 << 20)}
    with serve(zoo.model("llama2"), settings=settings) as server:
        server.wire.publish("a", adapter, activate=True)
        expected = ask(server, "a", 60)
        kv = server.wire.info().memory_bytes["kv"]
        versions = fill(server, adapter)
        released = server.metric("dorad_kv_pages_released")
        assert released > 0
        after = server.wire.info().memory_bytes
        assert after["kv"] < kv and sum(after.values()) <= held + (8 << 20)
        assert ask(server, "a", 60) == expected, "what is left of the cache suffices"
        for version in versions:
            server.wire.retire("many", version)
        # More than is there: 200 sequences of seven to ten pages.
        requests = [
            dict(
                prompt=[i + 1] * 60 + PROMPT, max_tokens=60, temperature=0.0, ignore_eos=True,
                adapter="a",
            )
            for i in range(200)
        ]  # fmt: skip

        def pages_came_back() -> bool:
            server.wire.generate_many(requests)
            return server.metric("dorad_kv_pages_released") < released

        wait_until(pages_came_back, timeout=60, what="the cache to take its memory back")
        assert server.metric("dorad_kv_grown_bytes_total") > 0
        assert ask(server, "a", 60) == expected


@pytest.mark.parametrize("keep_kv", [True, False])
def test_wake_without_enough_memory_says_so_and_works_later(zoo, keep_kv) -> None:
    adapter = zoo.adapter("llama2", "dora_r96")
    settings = SETTINGS | {"adapters.host_bytes": 64 << 20}
    with serve(zoo.model("llama2"), settings=settings) as server:
        server.wire.publish("a", adapter, activate=True)
        expected = ask(server, "a"), ask(server, "")
        server.wire.sleep(keep_kv=keep_kv)
        with gpu_hog(LEFT):
            for _ in range(2):
                refused = refusal(server.wire.wake)
                assert refused.code == grpc.StatusCode.RESOURCE_EXHAUSTED
                assert refused.reason == "OUT_OF_MEMORY"
                assert "memory.reserve" in refused.message
                assert set(server.wire.info().engine.sleeping) == {"adapters", "kv", "weights"}
        server.wire.wake()
        assert not server.wire.info().engine.sleeping
        assert (ask(server, "a"), ask(server, "")) == expected


def test_water_marks_that_cross_are_refused_at_the_start(zoo) -> None:
    settings = SETTINGS | {"memory.high_water": "0.5", "memory.low_water": "0.6"}
    line = command(zoo.model("llama2"), settings=settings)
    run = subprocess.run(line, capture_output=True, text=True, timeout=60, env=environment())
    assert run.returncode == 78
    assert "memory.low_water" in run.stderr and "memory.high_water" in run.stderr
