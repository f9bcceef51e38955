"""A GPU share limit: steps take a share of the time, and requests notice only that."""

import os
import signal
import threading
import time

import dorad
import pytest
from lib.server import serve, wait_until
from lib.wire import LENGTH, RAW, collect

PROMPT = [11, 12, 13, 14, 15]


@pytest.fixture(scope="module")
def adapter(zoo):
    return zoo.adapter("slow", "dora")


@pytest.fixture(scope="module")
def server(zoo, adapter):
    with serve(zoo.model("slow"), {"a": adapter}) as running:
        yield running


@pytest.fixture
def client(server):
    with dorad.Client(server.grpc, timeout=60) as made:
        yield made


def ask(wire, adapter: str = "a", tokens: int = 200):
    options = dict(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=RAW)
    (sample,) = wire.generate(PROMPT, adapter=adapter, **options)
    assert sample.reason == LENGTH
    return sample.tokens, list(sample.logprobs)


def busy_fraction(server, work) -> tuple[float, float]:
    """The parts of the time of `work` that steps took and were held back for."""
    names = ("dorad_engine_step_seconds_sum", "dorad_engine_throttled_seconds_total")
    before, began = [server.metric(name) for name in names], time.monotonic()
    work()
    wall = time.monotonic() - began
    stepping, held = (
        (server.metric(name) - at) / wall for name, at in zip(names, before, strict=True)
    )
    return stepping, held


def test_steps_take_their_share_of_the_time_and_answers_stay_the_same(server, client) -> None:
    wire = server.wire
    expected, base = ask(wire), ask(wire, "")
    assert server.metric("dorad_engine_gpu_share") == 1
    assert busy_fraction(server, lambda: ask(wire))[1] == 0, "there is no limit"
    for share in (0.25, 0.5):
        with client.limited_gpu_share(share) as in_effect:
            assert in_effect == share == server.metric("dorad_engine_gpu_share")
            got: list = []
            stepping, held = busy_fraction(
                server, lambda into=got: into.extend([ask(wire), ask(wire, "")])
            )
            assert got == [expected, base]
            # The cores have other work, too, and late wake-ups are made up for in part only.
            assert 0.5 * share < stepping < 1.2 * share, (stepping, held)
            assert stepping / (stepping + held) == pytest.approx(share, rel=0.4)
    assert server.metric("dorad_engine_gpu_share") == 1
    assert wire.info().engine.gpu_share == 1


def test_the_share_holds_for_many_streams_together(server, client) -> None:
    def streams() -> list:
        results: list = []
        threads = [
            threading.Thread(target=lambda: results.append(ask(server.wire)), daemon=True)
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return results

    expected = ask(server.wire)
    with client.limited_gpu_share(0.25):
        results: list = []
        stepping, held = busy_fraction(server, lambda: results.extend(streams()))
    assert results == [expected] * 4
    assert stepping < 0.3
    assert stepping / (stepping + held) == pytest.approx(0.25, rel=0.4)


def test_a_trainer_that_dies_does_not_leave_the_server_slow(server, client) -> None:
    assert client.limit_gpu_share(0.05, time_to_live=1.0, limit_id="dead") == 0.05
    assert server.wire.info().engine.gpu_share == 0.05
    # An idle engine keeps the time, too.
    wait_until(lambda: server.metric("dorad_engine_gpu_share") == 1, what="the limit to end")
    assert not client.end_gpu_share_limit("dead")


def test_the_smallest_share_counts_and_each_ends_alone(server, client) -> None:
    with client.limited_gpu_share(0.5), client.limited_gpu_share(0.25) as least:
        assert least == 0.25
        assert client.limit_gpu_share(0.75, time_to_live=60, limit_id="other") == 0.25
    assert client.info().engine.gpu_share == 0.75
    assert client.end_gpu_share_limit("other") and client.info().engine.gpu_share == 1


def test_the_configured_share_is_the_most(zoo, adapter) -> None:
    settings = {"engine.gpu_share": 0.5, "engine.stream_priority": "low"}
    with (
        serve(zoo.model("slow"), {"a": adapter}, settings) as server,
        dorad.Client(server.grpc) as client,
    ):
        assert client.info().engine.gpu_share == 0.5
        # Long enough for the 50 ms that an idle engine may make up for not to count.
        stepping, held = busy_fraction(server, lambda: ask(server.wire, tokens=500))
        assert stepping / (stepping + held) == pytest.approx(0.5, rel=0.4)
        assert client.limit_gpu_share(1.0, time_to_live=60, limit_id="greedy") == 0.5


def test_a_request_under_a_small_share_can_be_aborted_and_has_its_deadline(server, client) -> None:
    client.limit_gpu_share(0.01, time_to_live=600, limit_id="slow")
    try:
        with client.stream(PROMPT, max_tokens=2000, ignore_eos=True, request_id="r") as stream:
            next(stream)
            assert client.abort("r") == 1
            last = list(stream)[-1]
        assert last.finish is not None and last.finish.reason == "aborted"
        with pytest.raises(dorad.DeadlineExceeded):
            client.generate(PROMPT, max_tokens=8000, ignore_eos=True, timeout=0.5)
        wait_until(lambda: client.info().engine.running_sequences == 0, what="it to end")
    finally:
        assert client.end_gpu_share_limit("slow")


def test_a_server_that_ends_does_not_yield(zoo, adapter) -> None:
    with (
        serve(zoo.model("slow"), {"a": adapter}) as server,
        dorad.Client(server.grpc) as client,
    ):
        client.limit_gpu_share(0.01, time_to_live=600, limit_id="trainer")
        call = server.wire.stream(PROMPT, adapter="a", max_tokens=1000, ignore_eos=True)
        begun = collect([next(call)])
        os.kill(server.process.pid, signal.SIGTERM)
        (sample,) = collect(call, begun).values()
        assert sample.reason == LENGTH
        assert server.process.wait(30) == 0


@pytest.mark.parametrize("share", [0.0, 0.005, 1.5, float("nan")])
def test_impossible_shares_are_refused(server, client, share) -> None:
    with pytest.raises(dorad.InvalidArgument) as refused:
        client.limit_gpu_share(share, time_to_live=0, limit_id="a b")
    assert [violation.reason for violation in refused.value.violations] == [
        "GPU_SHARE_LIMIT_ID_INVALID",
        "GPU_SHARE_OUT_OF_RANGE",
        "TIME_TO_LIVE_OUT_OF_RANGE",
    ]
    assert server.wire.info().engine.gpu_share == 1


def test_yields_are_bounded(server, client) -> None:
    ids = [f"y{number}" for number in range(64)]
    for limit_id in ids:
        client.limit_gpu_share(0.9, time_to_live=60, limit_id=limit_id)
    with pytest.raises(dorad.DoradError) as refused:
        client.limit_gpu_share(0.9, time_to_live=60, limit_id="another")
    assert refused.value.reason == "TOO_MANY_GPU_SHARE_LIMITS"
    for limit_id in ids:
        assert client.end_gpu_share_limit(limit_id)
