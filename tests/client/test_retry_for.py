"""The retry budget: how long a call goes on without a server, and what it says at the end."""

import asyncio
import contextlib
import math
import pickle
import threading

import dorad
import dorad.aio
import grpc
import numpy as np
import pytest
from dorad import _retry
from dorad._channel import Budget
from dorad._retry import Attempts, Throttle
from fake_server import FakeServer, fail, overloaded, unavailable
from lib.server import free_port, wait_until

TENSORS = {"w": np.ones((2, 2), np.float32)}


def gone():
    return dorad.Unavailable("gone", code="UNAVAILABLE", retryable=True)


def full(hint=0.5):
    return dorad.Overloaded("full", code="RESOURCE_EXHAUSTED", retry_after=hint, retryable=True)


def paused(context):
    code = grpc.StatusCode.UNAVAILABLE
    fail(context, code, "ENGINE_PAUSED", "the engine is paused", retry_after=0.01)


def in_use(context):
    fail(context, grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_IN_USE", "it runs")


class Clock:
    """Time that passes only while an attempt waits."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(_retry.time, "monotonic", lambda: self.now)

    def delays(self, attempts, make):
        """The delays until the attempts end, and the last error."""
        found = []
        while True:
            error = make()
            delay = attempts.delay(error)
            if delay is None:
                return found, error
            found.append(delay)
            self.now += delay


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def fast(monkeypatch):
    """Backoff in milliseconds."""
    monkeypatch.setattr(_retry, "_FIRST_DELAY", 0.001)


# --- The decision.


def test_attempts_go_on_until_the_budget_ends_and_the_last_one_begins_with_its_end(clock):
    for _ in range(20):
        waits, error = clock.delays(Attempts(Budget(math.inf), 30.0), gone)
        assert sum(waits) == pytest.approx(30.0) and len(waits) > 8
        assert f"gave up after {len(waits) + 1} attempts in 30.0 s" in str(error)
        assert "retry_for=30" in str(error)


def test_a_hint_is_kept_and_one_beyond_the_budget_ends_the_call(clock):
    waits, error = clock.delays(Attempts(Budget(math.inf), 3.0), full)
    assert all(0.5 <= wait <= 0.625 for wait in waits) and 4 <= len(waits) <= 6
    assert "retry_for=3" in str(error)
    waits, error = clock.delays(Attempts(Budget(math.inf), 3.0), lambda: full(10.0))
    assert waits == [] and "gave up after 1 attempt " in str(error)


def test_the_timeout_ends_what_the_budget_would_allow(clock):
    waits, error = clock.delays(Attempts(Budget(10.0), 30.0), gone)
    assert 3 < sum(waits) < 10 and "timeout=10" in str(error)
    waits, error = clock.delays(Attempts(Budget(10.0), math.inf), gone)
    assert 3 < sum(waits) < 10 and "timeout=10" in str(error)


def test_the_budget_counts_from_the_first_failure(clock):
    attempts = Attempts(Budget(math.inf), 5.0)
    clock.now += 3600.0
    waits, _ = clock.delays(attempts, gone)
    assert sum(waits) == pytest.approx(5.0)


def test_without_a_budget_the_end_names_what_would_allow_more(clock):
    waits, error = clock.delays(Attempts(Budget(math.inf), None, Throttle()), gone)
    assert len(waits) == 4 and "gave up after 5 attempts" in str(error)
    assert "retry_for" in str(error)


def test_a_single_attempt_says_nothing_of_attempts(clock):
    for attempts in (Attempts(Budget(9.0), 0.0), Attempts(Budget(9.0), None, effects=True)):
        waits, error = clock.delays(attempts, gone)
        assert waits == [] and str(error) == "UNAVAILABLE: gone"


def test_failures_of_other_calls_do_not_end_a_budget(clock):
    throttle = Throttle()
    for _ in range(100):
        throttle.failed()
    waits, _ = clock.delays(Attempts(Budget(math.inf), 30.0, throttle), gone)
    assert sum(waits) == pytest.approx(30.0)


def test_an_attempt_that_meets_the_deadline_tells_the_cause_before_it(clock):
    attempts = Attempts(Budget(60.0), math.inf)
    assert attempts.delay(gone()) is not None
    error = dorad.DeadlineExceeded("Deadline Exceeded", code="DEADLINE_EXCEEDED")
    assert attempts.delay(error) is None
    assert "2 attempts" in str(error) and "UNAVAILABLE: gone" in str(error)


def test_what_the_end_says_survives_pickling(clock):
    _, error = clock.delays(Attempts(Budget(math.inf), 1.0), gone)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert error.message == "gone" and error.effort


@pytest.mark.parametrize("value", [-1.0, math.nan])
def test_refuses_what_is_no_time(value):
    with pytest.raises(ValueError, match="retry_for"):
        dorad.Client("127.0.0.1:1", retry_for=value)
    with (
        dorad.Client("127.0.0.1:1") as client,
        pytest.raises(ValueError, match="retry_for"),
    ):
        client.info(retry_for=value)


@pytest.mark.parametrize("value", ["soon", "-1", "nan"])
def test_refuses_an_environment_that_is_no_time(monkeypatch, value):
    monkeypatch.setenv("DORAD_RETRY_FOR", value)
    with pytest.raises(ValueError, match="DORAD_RETRY_FOR"):
        dorad.Client("127.0.0.1:1")


# --- One call.


@contextlib.contextmanager
def later(port, seconds=0.5):
    """A server that listens on the port in a while."""
    stack = contextlib.ExitStack()
    made = []

    def start():
        made.append(stack.enter_context(FakeServer(port=port)))

    timer = threading.Timer(seconds, start)
    timer.start()
    try:
        yield made
    finally:
        timer.join()
        stack.close()


CALLS = {
    "generate": lambda client, **given: client.generate([1], max_tokens=1, **given),
    "stream": lambda client, **given: list(client.stream([1], max_tokens=1, **given)),
    "generate_many": lambda client, **given: client.generate_many([[1]], max_tokens=1, **given),
    "score": lambda client, **given: client.score([[1, 2]], **given),
    "publish": lambda client, **given: client.publish("a", tensors=TENSORS, config={}, **given),
    "server_side": lambda client, **given: client.publish(
        "a", path="/a", server_side=True, **given
    ),
    "adapters": lambda client, **given: client.adapters(**given),
    "info": lambda client, **given: client.info(**given),
    "wake": lambda client, **given: client.wake(**given),
    "pause": lambda client, **given: client.pause(**given),
}


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_waits_for_a_server_that_is_not_there_yet(kind):
    port = free_port()
    with dorad.Client(f"127.0.0.1:{port}", timeout=60) as client, later(port):
        CALLS[kind](client, retry_for=30)


@pytest.mark.parametrize("given", ["client", "environment", "asynchronous"])
def test_the_budget_may_be_the_clients(monkeypatch, given):
    port = free_port()
    target = f"127.0.0.1:{port}"
    if given == "environment":
        monkeypatch.setenv("DORAD_RETRY_FOR", "30")

    async def ask():
        async with dorad.aio.Client(target, retry_for=30) as client:
            await client.info()

    with later(port):
        if given == "asynchronous":
            asyncio.run(ask())
        else:
            budget = {"retry_for": 30} if given == "client" else {}
            with dorad.Client(target, **budget) as client:
                client.info()


def test_the_calls_own_budget_comes_before_the_clients(server):
    server.refuse_generate = [unavailable] * 2
    with dorad.Client(server.target, retry_for=30) as client:
        with pytest.raises(dorad.Unavailable):
            client.generate([1], retry_for=0)
        assert len(server.generate_calls) == 1
        with pytest.raises(dorad.Unavailable):
            client.generate_many([[1]], retry_for=0)
        assert len(server.generate_calls) == 2


def test_a_pause_is_waited_for_beyond_the_default_attempts(server, fast):
    server.refuse_generate = [paused] * 20
    with dorad.Client(server.target, timeout=60) as client:
        assert len(client.generate([1], max_tokens=1, retry_for=30)) == 1
        assert len(server.generate_calls) == 21
        server.refuse_generate = [paused] * 20
        with pytest.raises(dorad.Unavailable, match=r"ENGINE_PAUSED.*5 attempts.*retry_for"):
            client.generate([1], max_tokens=1)


def test_one_error_at_the_end_names_the_budget_the_attempts_and_the_cause():
    with (
        dorad.Client(f"127.0.0.1:{free_port()}") as client,
        pytest.raises(dorad.Unavailable) as caught,
    ):
        client.generate([1], retry_for=0.3)
    (line,) = str(caught.value).splitlines()
    assert "Connection refused" in line and "retry_for=0.3" in line and "attempts in 0." in line


EFFECTS = {
    "activate": lambda client, **given: client.activate("a@1", **given),
    "retire": lambda client, **given: client.retire("a@1", **given),
}


@pytest.mark.parametrize("kind", EFFECTS)
def test_a_change_is_repeated_with_a_budget_if_the_server_was_not_reached(kind):
    port = free_port()
    with dorad.Client(f"127.0.0.1:{port}") as client:
        with pytest.raises(dorad.Unavailable) as caught:
            EFFECTS[kind](client)
        assert not caught.value.effort
        with later(port), pytest.raises(dorad.NotFound):
            EFFECTS[kind](client, retry_for=30)


class Losing(FakeServer):
    """Activates, and loses the answer."""

    def __init__(self):
        super().__init__()
        self.activations = 0

    def Activate(self, request, context):
        self.activations += 1
        context.abort(grpc.StatusCode.UNAVAILABLE, "connection lost")


def test_a_change_that_may_have_happened_is_not_repeated():
    with Losing() as server, dorad.Client(server.target, retry_for=30) as client:
        with pytest.raises(dorad.Unavailable, match="connection lost"):
            client.activate("a@1")
        assert server.activations == 1


# --- A broken answer.


class Breaking(FakeServer):
    """Its calls break after so many samples, one number for each call."""

    breaks = ()

    def _tokens(self, request, context):
        left, *self.breaks = self.breaks or [None]
        for count, message in enumerate(super()._tokens(request, context)):
            if count == left:
                context.abort(grpc.StatusCode.UNAVAILABLE, "connection lost")
            yield message


@pytest.fixture
def server():
    with Breaking() as fake:
        yield fake


def test_generate_repeats_a_broken_answer_whole_and_under_one_id(server, client, fast):
    server.breaks = [1, 2]
    samples = client.generate([1], n=3, max_tokens=2)
    assert [s.token_ids.tolist() for s in samples] == [[1, 2], [11, 12], [21, 22]]
    ids = {call.request_id for call in server.generate_calls}
    assert len(server.generate_calls) == 3 and len(ids) == 1 and "" not in ids
    client.generate([1], max_tokens=1)
    assert server.generate_calls[-1].request_id not in ids


def test_a_repeated_request_waits_for_the_end_of_the_attempt_before(server, client, fast):
    server.breaks = [1]
    server.refuse_generate = [None, in_use, in_use]
    assert len(client.generate([1], n=2, max_tokens=1)) == 2
    assert len(server.generate_calls) == 4
    assert len({call.request_id for call in server.generate_calls}) == 1


def test_an_id_of_the_caller_or_of_its_metadata_is_kept(server):
    with dorad.Client(server.target, metadata=[("x-request-id", "theirs")]) as client:
        client.generate([1], max_tokens=1)
        client.generate([1], max_tokens=1, request_id="mine")
    assert [call.HasField("request_id") for call in server.generate_calls] == [False, True]
    assert server.generate_calls[1].request_id == "mine"


def test_a_stream_that_was_read_is_not_repeated_even_with_a_budget(server, client):
    server.break_after = 2
    tokens = []
    with pytest.raises(dorad.Unavailable, match="connection lost"):
        for delta in client.stream([1], max_tokens=5, retry_for=30):
            tokens += delta.token_ids.tolist()
    assert tokens == [1, 2] and len(server.generate_calls) == 1


# --- Many prompts.


def test_many_prompts_go_on_until_their_timeout_by_default(server, fast):
    server.refuse_generate = [unavailable, paused] * 20
    with dorad.Client(server.target, timeout=60) as client:
        results = client.generate_many([[i] for i in range(4)], max_tokens=1)
    assert [r[0].token_ids.tolist() for r in results] == [[0], [1], [2], [3]]
    with (
        dorad.Client(f"127.0.0.1:{free_port()}") as client,
        pytest.raises(dorad.Unavailable, match=r"timeout=0\.3"),
    ):
        client.generate_many([[1]], timeout=0.3)


def test_many_prompts_outlive_a_server():
    port = free_port()
    with dorad.Client(f"127.0.0.1:{port}", timeout=60) as client:
        with FakeServer(port=port) as first:
            first.endless = True
            results = []
            rollout = threading.Thread(
                target=lambda: results.extend(
                    client.generate_many([[i] for i in range(9)], max_tokens=1)
                )
            )
            rollout.start()
            wait_until(lambda: first.running == 9)
        with FakeServer(port=port):
            rollout.join(50)
    assert [r[0].token_ids.tolist() for r in results] == [[i] for i in range(9)]


def test_prompts_that_a_server_aborts_as_it_ends_are_sent_again(server, fast):
    from dorad.v1 import types_pb2
    from grpc_health.v1 import health_pb2

    server.finish_reason = types_pb2.FINISH_REASON_ABORTED
    with dorad.Client(server.target, timeout=60) as client:
        aborted = client.generate_many([[1]], max_tokens=1)  # by a caller
        assert aborted[0][0].finish_reason is dorad.FinishReason.ABORTED
        server.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        assert client.generate([1], max_tokens=1)[0].finish_reason is dorad.FinishReason.ABORTED
        with pytest.raises(dorad.Unavailable, match="ends"):
            client.generate_many([[1]], max_tokens=1, retry_for=0.1)


# --- The pool.


def test_a_pool_waits_until_a_server_is_back():
    port = free_port()
    target = f"127.0.0.1:{port}"
    with dorad.RolloutPool([target], timeout=60) as pool:
        with later(port):
            results = pool.generate_many([[i] for i in range(5)], max_tokens=1)
            assert [r[0].token_ids.tolist() for r in results] == [[i] for i in range(5)]
        with pytest.raises(dorad.Unavailable, match=r"timeout=0\.3"):
            pool.generate_many([[1]], timeout=0.3)
        with pytest.raises(dorad.Unavailable, match=r"retry_for=0\.3"):
            pool.generate_many([[1]], retry_for=0.3)


def test_a_pool_learns_the_active_version_from_a_server_that_is_back():
    port = free_port()
    with dorad.RolloutPool([f"127.0.0.1:{port}"], timeout=60) as pool, later(port) as made:
        prompts = threading.Thread(
            target=lambda: made.append(pool.generate_many([[1]], adapter="a", max_tokens=1))
        )
        wait_until(lambda: made)
        pool.publish("a", tensors=TENSORS, config={})
        prompts.start()
        prompts.join(30)
        assert made[1][0][0].spans[0].label == "a@1"


def test_a_pools_prompt_moves_from_a_paused_server_at_once_and_keeps_its_id(server):
    with FakeServer() as second, dorad.RolloutPool([server.target, second.target]) as pool:
        server.refuse_generate = [paused] * 4
        assert len(pool.generate_many([[i] for i in range(8)], max_tokens=1)) == 8
        refused = {call.request_id for call in server.generate_calls[:1]}
        assert refused <= {call.request_id for call in second.generate_calls}
        assert "" not in refused


def test_a_pools_prompt_waits_for_its_own_attempt_on_the_server_whose_connection_broke(server):
    with FakeServer() as second, dorad.RolloutPool([server.target, second.target]) as pool:
        server.breaks = [0]
        server.refuse_generate = [None, in_use]
        second.refuse_generate = [overloaded(0.01)] * 3
        (samples,) = pool.generate_many([[1]], max_tokens=1)
        assert samples[0].token_ids.tolist() == [1]
        assert len(server.generate_calls) == 3 and len(second.generate_calls) == 3


def test_a_server_that_returns_gets_prompts_of_the_running_rollout(server, monkeypatch):
    from dorad import _pool

    monkeypatch.setattr(_pool, "PROBE_SECONDS", 0.2)
    with FakeServer() as second, dorad.RolloutPool([server.target, second.target]) as pool:
        server.refuse_generate = [unavailable]
        second.token_delay = 0.05
        pool.generate_many([[i] for i in range(60)], max_tokens=2, concurrency=4)
        assert pool.report()[0].completed > 5


def test_closing_a_pool_ends_its_waits(server):
    server.refuse_generate = [overloaded(1000.0)]

    async def body():
        pool = dorad.aio.RolloutPool([server.target], timeout=None)
        call = asyncio.create_task(pool.generate_many([[1]]))
        await asyncio.to_thread(wait_until, lambda: len(server.generate_calls) == 1)
        await asyncio.sleep(0.1)
        await pool.close()
        with pytest.raises(dorad.Cancelled):
            await asyncio.wait_for(call, 20)

    asyncio.run(body())
