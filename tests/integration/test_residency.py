"""More adapters than fit: the least recently used durable ones make room and come back."""

import threading
from pathlib import Path

import grpc
import pytest
from lib.server import device, serve, wait_until
from lib.wire import LENGTH, failure

PROMPT = [11, 12, 13, 14, 15]
ADAPTERS = 6


def answer(wire, adapter: str, tokens: int = 8) -> list[int]:
    options = dict(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    (sample,) = wire.generate(PROMPT, adapter=adapter, **options)
    assert sample.reason == LENGTH
    return sample.tokens


@pytest.fixture(scope="module")
def folders(zoo) -> list[Path]:
    return [zoo.adapter("slow", "dora", seed) for seed in range(ADAPTERS)]


@pytest.fixture(scope="module")
def alone(zoo, folders) -> tuple[list[list[int]], int]:
    """The answer of each adapter, and the bytes of one, from a server without limit."""
    names = {f"a{i}": folder for i, folder in enumerate(folders)}
    with serve(zoo.model("slow"), names) as server:
        answers = [answer(server.wire, name) for name in names]
        assert all(item.resident for item in server.wire.list_adapters())
        size = server.wire.adapter("a0").resident_bytes
    assert len({tuple(tokens) for tokens in answers}) == ADAPTERS
    return answers, size


def settings(tmp_path: Path, fit: float, size: int, host: float = 0.0) -> dict:
    """Room for `fit` adapters where they are used, and for `host` in host memory."""
    page = 2 << 20 if device() == "cuda" else 1  # of the memory that images lie in
    return {
        "adapters.store_path": tmp_path / "store",
        "adapters.resident_bytes": int(fit * size),
        "adapters.host_bytes": int(host * -(-size // page) * page),
        "engine.kv_bytes": 64 << 20,
    }


def test_adapters_take_turns_and_answer_as_if_alone(zoo, folders, alone, tmp_path) -> None:
    answers, size = alone
    with serve(zoo.model("slow"), None, settings(tmp_path, 2.5, size)) as server:
        wire = server.wire
        for i, folder in enumerate(folders):
            wire.publish(f"a{i}", folder, activate=True, durable=True)
        assert wire.info().memory_bytes["adapters"] == 2 * size
        assert sum(item.resident for item in wire.list_adapters()) == 2
        assert server.metric("dorad_adapter_evicted_versions") == ADAPTERS - 2
        failures = []

        def ask(first: int) -> None:
            for round_ in range(4):
                i = (first + round_) % ADAPTERS
                if answer(wire, f"a{i}") != answers[i]:
                    failures.append(i)
                assert wire.info().memory_bytes["adapters"] <= int(2.5 * size)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(ADAPTERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not failures and not any(thread.is_alive() for thread in threads)
        assert server.metric("dorad_adapter_reloads_total", **{"from": "store"}) > 0
        assert server.metric("dorad_adapter_evictions_total") > 0
        # One request for all of them.
        (scores,) = wire.score([[*PROMPT, *answers[0]]], [f"a{i}" for i in range(ADAPTERS)])
        assert len({score.logprobs[-1] for score in scores}) == ADAPTERS
        assert wire.info().engine.adapter_leases == 0


def test_more_than_fit_come_back_after_a_restart(zoo, folders, alone, tmp_path) -> None:
    answers, size = alone
    for run in range(2):
        with serve(zoo.model("slow"), None, settings(tmp_path, 1.5, size)) as server:
            for i, folder in enumerate(folders[:3]):
                if run == 0:
                    server.wire.publish(f"a{i}", folder, activate=True, durable=True)
            assert [answer(server.wire, f"a{i}") for i in range(3)] == answers[:3]


def test_what_is_pinned_is_so_after_a_restart(zoo, folders, alone, tmp_path) -> None:
    answers, size = alone
    with serve(zoo.model("slow"), None, settings(tmp_path, 2.5, size)) as server:
        server.wire.publish("pinned", folders[0], activate=True, durable=True, pinned=True)
        for i in (1, 2):
            server.wire.publish(f"a{i}", folders[i], activate=True, durable=True)
    with serve(zoo.model("slow"), None, settings(tmp_path, 2.5, size)) as server:
        for i in (1, 2, 1):
            assert answer(server.wire, f"a{i}") == answers[i]
            assert server.wire.adapter("pinned").resident
        assert answer(server.wire, "pinned") == answers[0]


def test_what_cannot_come_back_stays_and_is_refused_beyond_the_limit(
    zoo, folders, alone, tmp_path
) -> None:
    answers, size = alone
    with serve(zoo.model("slow"), None, settings(tmp_path, 2.5, size)) as server:
        wire = server.wire
        wire.publish("ephemeral", folders[0], activate=True)
        wire.publish("pinned", folders[1], activate=True, durable=True, pinned=True)
        with pytest.raises(grpc.RpcError) as caught:
            wire.publish("another", folders[2])
        refusal = failure(caught.value)
        assert refusal.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refusal.reason == "OUT_OF_MEMORY"
        # A durable one is stored, but there will be no room for it while those two stay.
        wire.publish("durable", folders[2], activate=True, durable=True)
        assert not wire.adapter("durable").resident
        with pytest.raises(grpc.RpcError) as caught:
            answer(wire, "durable")
        assert failure(caught.value).reason == "OUT_OF_MEMORY"
        assert answer(wire, "ephemeral") == answers[0] and answer(wire, "pinned") == answers[1]
        wire.retire("ephemeral", 1)
        wait_until(lambda: wire.info().memory_bytes["adapters"] == size, what="room")
        assert answer(wire, "durable") == answers[2]


def test_ephemeral_versions_take_turns_through_host_memory(zoo, folders, alone, tmp_path) -> None:
    answers, size = alone
    with serve(zoo.model("slow"), None, settings(tmp_path, 2.5, size, host=5.0)) as server:
        wire = server.wire
        for i, folder in enumerate(folders):
            wire.publish(f"a{i}", folder, activate=True)
        versions = wire.list_adapters()
        assert sum(item.resident for item in versions) == 2
        assert sum(item.in_host_memory for item in versions) == ADAPTERS - 2
        assert server.metric("dorad_adapter_host_bytes") >= (ADAPTERS - 2) * size
        with pytest.raises(grpc.RpcError) as caught:
            wire.publish("one-too-many", folders[0])
        assert failure(caught.value).reason == "OUT_OF_MEMORY"
        failures = []

        def ask(first: int) -> None:
            for round_ in range(4):
                i = (first + round_) % ADAPTERS
                if answer(wire, f"a{i}") != answers[i]:
                    failures.append(i)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(ADAPTERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not failures and not any(thread.is_alive() for thread in threads)
        assert server.metric("dorad_adapter_reloads_total", **{"from": "host"}) > 0
        assert server.metric("dorad_adapter_reloads_total", **{"from": "store"}) == 0
        for i in range(ADAPTERS):
            wire.retire(f"a{i}", 1)
        wait_until(lambda: server.metric("dorad_adapter_host_bytes") == 0, what="host memory")
        wait_until(lambda: wire.info().memory_bytes["adapters"] == 0, what="memory")


def test_durable_versions_beyond_host_memory_come_from_the_store(
    zoo, folders, alone, tmp_path
) -> None:
    answers, size = alone
    with serve(zoo.model("slow"), None, settings(tmp_path, 1.5, size, host=1.5)) as server:
        wire = server.wire
        for i, folder in enumerate(folders[:4]):
            wire.publish(f"a{i}", folder, activate=True, durable=True)
        for _ in range(2):
            for i in range(4):
                assert answer(wire, f"a{i}") == answers[i]
        assert server.metric("dorad_adapter_reloads_total", **{"from": "store"}) > 0
        for i in (2, 3, 2, 3):
            assert answer(wire, f"a{i}") == answers[i]
        assert server.metric("dorad_adapter_reloads_total", **{"from": "host"}) > 0


def test_a_damaged_store_is_to_blame_for_what_it_cannot_bring(
    zoo, folders, alone, tmp_path
) -> None:
    answers, size = alone
    with serve(zoo.model("slow"), None, settings(tmp_path, 1.5, size)) as server:
        wire = server.wire
        for i in range(2):
            wire.publish(f"a{i}", folders[i], activate=True, durable=True)
        assert answer(wire, "a0") == answers[0] and answer(wire, "a1") == answers[1]
        assert not wire.adapter("a0").resident
        for file in (tmp_path / "store" / "objects").rglob("adapter_model.safetensors"):
            file.unlink()
        with pytest.raises(grpc.RpcError) as caught:
            answer(wire, "a0")
        refusal = failure(caught.value)
        assert (refusal.code, refusal.reason) == (
            grpc.StatusCode.DATA_LOSS,
            "STORE_OBJECT_DAMAGED",
        )
        store = tmp_path / "store"
        objects = [str(path.relative_to(store)) for path in store.glob("objects/*/*")]
        assert any(path in refusal.message for path in objects)
        assert str(tmp_path) not in refusal.message
        assert server.metric("dorad_store_failures_total", reason="STORE_OBJECT_DAMAGED") >= 1
        assert len(answer(wire, "", 3)) == 3, "the server goes on"


def test_running_streams_keep_their_adapter_resident(zoo, folders, alone, tmp_path) -> None:
    answers, size = alone
    with serve(zoo.model("slow"), None, settings(tmp_path, 1.5, size)) as server:
        wire = server.wire
        for i in range(2):
            wire.publish(f"a{i}", folders[i], activate=True, durable=True)
        assert answer(wire, "a0") == answers[0]
        call = wire.stream(PROMPT, adapter="a0", temperature=0.0, max_tokens=400, ignore_eos=True)
        next(call)
        waiting = threading.Thread(target=lambda: got.append(answer(wire, "a1")), daemon=True)
        got: list[list[int]] = []
        waiting.start()
        wait_until(lambda: wire.info().engine.queued_requests == 1, what="the other to wait")
        assert wire.adapter("a0").resident and not wire.adapter("a1").resident
        assert len(answer(wire, "", 3)) == 3, "the base does not wait"
        call.cancel()
        waiting.join(60)
        assert got == [answers[1]]
