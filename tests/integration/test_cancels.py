"""Calls that are given up at every stage of their life end at once, and nothing of them stays."""

import random
import time

import grpc
import pytest
from lib.server import Server, is_idle, serve, wait_until
from lib.wire import Wire

PROMPT = [11, 12, 13, 14, 15]
TIMES = 200
AT_ONCE = 20


@pytest.fixture(scope="module")
def server(zoo):
    adapters = {"a": zoo.adapter("slow", "dora")}
    settings = {
        "engine.kv_bytes": 256 << 20,
        "engine.prefix_cache": False,
        "engine.max_step_tokens": 32,
        "engine.max_running_sequences": 8,
    }
    with serve(zoo.model("slow"), adapters, settings) as running:
        yield running


def assert_idle(server: Server) -> None:
    wait_until(lambda: is_idle(server), 20, "an idle engine")


def requests_in(server: Server) -> int:
    engine = server.wire.info().engine
    return engine.running_sequences + engine.queued_requests


def ended(server: Server, outcome: str) -> float:
    return server.metrics().get(
        f'dorad_requests_ended_total{{kind="generate",outcome="{outcome}"}}', 0
    )


def assert_all_cancelled_once(server: Server, before: float, count: int) -> None:
    assert_idle(server)
    wait_until(lambda: ended(server, "cancelled") == before + count, what="all cancels counted")


def code_of(call) -> grpc.StatusCode:
    try:
        for _ in call:
            pass
    except grpc.RpcError:
        pass
    return call.code()


def test_cancels_in_the_queue(server: Server) -> None:
    blockers = [
        server.wire.stream(PROMPT, max_tokens=8000, ignore_eos=True, priority=-1) for _ in range(8)
    ]
    for blocker in blockers:
        next(blocker)
    before = ended(server, "cancelled")
    for _ in range(TIMES // AT_ONCE):
        calls = [server.wire.stream(PROMPT, adapter="a", n=2) for _ in range(AT_ONCE)]
        wait_until(
            lambda: server.wire.info().engine.queued_requests == AT_ONCE, what="all to queue"
        )
        for call in calls:
            call.cancel()
        assert {code_of(call) for call in calls} == {grpc.StatusCode.CANCELLED}
        wait_until(lambda: server.wire.info().engine.queued_requests == 0, what="an empty queue")
    assert server.wire.info().engine.adapter_leases == 0
    for blocker in blockers:
        blocker.cancel()
    assert_all_cancelled_once(server, before, TIMES + len(blockers))


def test_cancels_during_prefill(server: Server) -> None:
    """Prompts of 4000 tokens in steps of 32: no first token before the cancel."""
    before = ended(server, "cancelled")
    tokens = server.metric("dorad_generated_tokens_total")
    for _ in range(TIMES // AT_ONCE):
        calls = [server.wire.stream([7] * 4000, adapter="a", max_tokens=10) for _ in range(AT_ONCE)]
        # A call that is cancelled before its request has arrived is not counted.
        wait_until(lambda: requests_in(server) == AT_ONCE, what="all requests and a prefill")
        for call in calls:
            call.cancel()
        assert_idle(server)
    assert_all_cancelled_once(server, before, TIMES)
    assert server.metric("dorad_generated_tokens_total") == tokens


def test_cancels_around_the_last_token(server: Server) -> None:
    """The cancel races with the end: the request ends once."""
    choose = random.Random(3)
    admitted = server.metric("dorad_requests_admitted_total", kind="generate")
    finished = server.metric("dorad_requests_ended_total", kind="generate")
    for _ in range(TIMES // AT_ONCE):
        calls = [
            server.wire.stream(PROMPT, adapter="a", max_tokens=6, ignore_eos=True)
            for _ in range(AT_ONCE // 4)
        ]
        for call in calls:
            messages = 0
            try:
                for message in call:
                    messages += 1
                    if message.HasField("finish") or messages >= choose.randint(3, 6):
                        break
            except grpc.RpcError:
                pytest.fail(f"{call.code()} before any cancel")
            call.cancel()
        assert {code_of(call) for call in calls} <= {
            grpc.StatusCode.OK,
            grpc.StatusCode.CANCELLED,
        }
    assert_idle(server)
    count = server.metric("dorad_requests_admitted_total", kind="generate") - admitted
    assert count == TIMES // 4
    wait_until(
        lambda: server.metric("dorad_requests_ended_total", kind="generate") == finished + count,
        what="each request to be counted once",
    )


@pytest.mark.parametrize("deadline", [0.001, 0.05])
def test_short_deadlines_drop_the_work(server: Server, deadline: float) -> None:
    """Behind eight blockers nobody of them gets a turn: no token of theirs is computed."""
    blockers = [
        server.wire.stream(PROMPT, max_tokens=8000, ignore_eos=True, priority=-1) for _ in range(8)
    ]
    for blocker in blockers:
        next(blocker)
    prompts = server.metric("dorad_prompt_tokens_total", source="computed")
    with_own_channel = Wire(server.grpc)
    for _ in range(TIMES // AT_ONCE):
        calls = [
            with_own_channel.stream([7] * 1000, adapter="a", max_tokens=10, timeout=deadline)
            for _ in range(AT_ONCE)
        ]
        assert {code_of(call) for call in calls} == {grpc.StatusCode.DEADLINE_EXCEEDED}
    wait_until(lambda: server.wire.info().engine.queued_requests == 0, what="an empty queue")
    wait_until(lambda: server.wire.info().engine.adapter_leases == 0, what="no leases")
    assert server.metric("dorad_prompt_tokens_total", source="computed") == prompts
    for blocker in blockers:
        blocker.cancel()
    with_own_channel.close()
    assert_idle(server)


def test_without_a_deadline_the_servers_own_one_holds(zoo) -> None:
    settings = {"engine.kv_bytes": 64 << 20, "server.default_deadline_seconds": 1}
    with serve(zoo.model("slow"), None, settings) as server:
        begin = time.monotonic()
        call = server.wire.stream(PROMPT, max_tokens=8000, ignore_eos=True, timeout=None)
        assert code_of(call) == grpc.StatusCode.DEADLINE_EXCEEDED
        assert time.monotonic() - begin >= 0.9
        assert_idle(server)
