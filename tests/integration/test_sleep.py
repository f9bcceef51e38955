"""Sleep and Wake: memory is released and allocated again, and requests notice only the time."""

import contextlib
import os
import signal
import threading
import time

import grpc
import pytest
from dorad.v1 import types_pb2
from lib.server import device, serve, wait_until
from lib.wire import LENGTH, RAW, collect, failure

PROMPT = [11, 12, 13, 14, 15]
TAGS = ["weights", "kv", "adapters"]
SETTINGS = {"engine.kv_bytes": 64 << 20, "adapters.host_bytes": 64 << 20}


@pytest.fixture(scope="module")
def adapter(zoo):
    return zoo.adapter("slow", "dora")


def ask(wire, adapter: str = "a", tokens: int = 20):
    options = dict(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=RAW)
    (sample,) = wire.generate(PROMPT, adapter=adapter, **options)
    assert sample.reason == LENGTH
    return sample.tokens, list(sample.logprobs)


def in_background(work) -> tuple[threading.Thread, list]:
    results: list = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    return thread, results


@pytest.mark.parametrize("host_weights", [True, False])
def test_answers_are_the_same_before_and_after(zoo, adapter, host_weights) -> None:
    settings = SETTINGS | {"memory.host_weights": str(host_weights).lower()}
    with serve(zoo.model("slow"), {"a": adapter}, settings) as server:
        wire = server.wire
        before, base = ask(wire), ask(wire, "")
        held = dict(wire.info().memory_bytes)
        freed = wire.sleep()
        assert set(freed) == set(TAGS)
        assert list(wire.info().engine.sleeping) == sorted(TAGS)
        assert all(server.metric("dorad_sleeping", tag=tag) == 1 for tag in TAGS)
        if device() == "cuda":
            assert all(freed[tag] >= held[tag] > 0 for tag in TAGS)
            assert all(wire.info().memory_bytes.get(tag, 0) == 0 for tag in TAGS)
        else:
            assert freed["kv"] > 0 and freed["adapters"] == held["adapters"] > 0
        assert wire.sleep() == {}, "it sleeps already"
        wire.wake()
        assert not wire.info().engine.sleeping
        assert ask(wire) == before and ask(wire, "") == base
        wire.wake()


@pytest.mark.parametrize("keep_kv", [True, False])
@pytest.mark.parametrize("tags", [[], ["kv"], ["adapters"], ["weights"]])
def test_running_streams_go_on_where_they_were(zoo, adapter, keep_kv, tags) -> None:
    with serve(zoo.model("slow"), {"a": adapter}, SETTINGS) as server:
        wire = server.wire
        expected = ask(wire, tokens=300)
        thread, results = in_background(lambda: ask(wire, tokens=300))
        wait_until(lambda: wire.info().engine.running_sequences == 1, what="the stream to run")
        wire.sleep(*tags, keep_kv=keep_kv)
        steps = wire.info().engine.steps
        time.sleep(0.1)
        assert wire.info().engine.steps == steps and not results
        wire.wake(*tags)
        thread.join(60)
        assert results == [expected]


def test_requests_wait_or_are_refused_with_a_hint(zoo, adapter) -> None:
    with serve(zoo.model("slow"), {"a": adapter}, SETTINGS) as server:
        wire = server.wire
        expected = ask(wire)
        wire.sleep("kv")
        thread, results = in_background(lambda: ask(wire))
        wait_until(lambda: wire.info().engine.queued_requests == 1, what="the request to wait")
        wire.sleep("adapters", refuse_requests=True)
        with pytest.raises(grpc.RpcError) as caught:
            ask(wire)
        refusal = failure(caught.value)
        assert refusal.code == grpc.StatusCode.UNAVAILABLE and refusal.reason == "SERVER_SLEEPING"
        assert refusal.retry_after is not None and refusal.retry_after > 0
        wire.wake("kv")
        assert list(wire.info().engine.sleeping) == ["adapters"] and not results
        wire.wake("adapters")
        thread.join(60)
        assert results == [expected]


def test_versions_are_published_and_activated_meanwhile_but_not_without_weights(
    zoo, adapter
) -> None:
    with serve(zoo.model("slow"), {"a": adapter}, SETTINGS) as server:
        wire = server.wire
        expected = ask(wire)
        wire.sleep("kv", "adapters")
        published = wire.publish("b", adapter, activate=True).adapter
        assert not wire.adapter("b").resident and wire.adapter("b").in_host_memory
        wire.sleep("weights")
        with pytest.raises(grpc.RpcError) as caught:
            wire.publish("c", adapter)
        assert failure(caught.value).reason == "SERVER_SLEEPING"
        wire.retire("a", 1)
        wire.wake()
        assert ask(wire, f"b@{published.version}") == expected
        assert wire.publish("c", adapter, activate=True)
        assert ask(wire, "c") == expected


def test_what_is_in_line_when_the_weights_go_is_published_when_they_are_back(zoo, adapter) -> None:
    def publish() -> str:
        try:
            wire.publish("b", adapter)
        except grpc.RpcError as error:
            return failure(error).reason
        return ""

    def states() -> dict[int, int]:
        return {version.version: version.state for version in wire.list_adapters("b")}

    with serve(zoo.model("slow"), {"a": adapter}, SETTINGS) as server:
        wire = server.wire
        expected = ask(wire)
        publishes = [in_background(publish) for _ in range(12)]
        wait_until(lambda: wire.list_adapters("b"), what="a version to be given its number")
        wire.sleep("weights")
        before = states()
        time.sleep(0.1)
        # Of an upload that was let in before, the number may come a little later.
        assert before.items() <= states().items(), "nothing is loaded meanwhile"
        wire.wake()
        for thread, _ in publishes:
            thread.join(60)
        reasons = [reason for _, results in publishes for reason in results]
        assert len(reasons) == 12 and set(reasons) <= {"", "SERVER_SLEEPING"}
        assert len(states()) == reasons.count(""), "who was refused took no number"
        assert set(states().values()) == {types_pb2.ADAPTER_STATE_READY}
        assert ask(wire, "b@1") == expected


def test_unknown_tags_are_refused(zoo) -> None:
    with serve(zoo.model("slow"), None, SETTINGS) as server:
        for call in (server.wire.sleep, server.wire.wake):
            with pytest.raises(grpc.RpcError) as caught:
                call("kv", "gpu")
            assert failure(caught.value).reason == "SLEEP_TAG_INVALID"
        assert not server.wire.info().engine.sleeping


def test_a_sleeping_server_ends_in_order(zoo, adapter) -> None:
    def publish() -> None:
        with contextlib.suppress(grpc.RpcError):
            wire.publish("b", adapter)

    settings = SETTINGS | {"server.drain_timeout_seconds": 1}
    # What has been freed is filled with other bytes.
    freed = {"MALLOC_PERTURB_": "165", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
    with serve(zoo.model("slow"), {"a": adapter}, settings, **freed) as server:
        wire = server.wire
        call = wire.stream(PROMPT, adapter="a", max_tokens=400, ignore_eos=True)
        begun = collect([next(call)])
        for _ in range(12):
            in_background(publish)
        wait_until(lambda: wire.list_adapters("b"), what="a version to be given its number")
        wire.sleep()
        os.kill(server.process.pid, signal.SIGTERM)
        (sample,) = collect(call, begun).values()
        assert sample.reason != LENGTH
        assert server.process.wait(30) == 0
