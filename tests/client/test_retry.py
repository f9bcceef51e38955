"""When the client sends a call again, and when it says at once that there is no use in it."""

import asyncio
import itertools
import logging
import math
import threading
import time

import dorad
import grpc
import numpy as np
import pytest
from dorad._channel import Budget
from dorad._retry import Attempts, Throttle, UploadAttempts
from dorad.errors import from_rpc_error
from fake_server import fail, overloaded, unavailable
from lib.server import wait_until
from lib.toxics import BadNetwork, Toxic

NO_LIMIT = Budget(math.inf)
GONE = dorad.Unavailable("gone", code="UNAVAILABLE", retryable=True)
FULL = dorad.Overloaded("full", code="RESOURCE_EXHAUSTED", retry_after=0.5, retryable=True)


class Failed(grpc.RpcError):
    """A call that ended with `code` and `trailers`."""

    def __init__(self, code, *trailers):
        self._code, self._trailers = code, trailers

    def code(self):
        return self._code

    def details(self):
        return "no"

    def trailing_metadata(self):
        return self._trailers


@pytest.mark.parametrize(
    ("code", "pushback", "retryable", "retry_after"),
    [
        ("UNAVAILABLE", None, True, None),
        ("UNAVAILABLE", "250", True, 0.25),
        ("UNAVAILABLE", "-1", False, None),
        ("UNAVAILABLE", "soon", False, None),
        ("RESOURCE_EXHAUSTED", "0", True, 0.0),
        ("RESOURCE_EXHAUSTED", "-1", False, None),
        # gRPC's own, of a message that is too large: it will be as large the next time.
        ("RESOURCE_EXHAUSTED", None, False, None),
        ("INVALID_ARGUMENT", "250", False, 0.25),
        ("DEADLINE_EXCEEDED", None, False, None),
        ("INTERNAL", None, False, None),
    ],
)
def test_what_the_server_says_decides(code, pushback, retryable, retry_after):
    trailers = [] if pushback is None else [("grpc-retry-pushback-ms", pushback)]
    error = from_rpc_error(Failed(grpc.StatusCode[code], *trailers))
    assert (error.retryable, error.retry_after) == (retryable, retry_after)


def delays(attempts, errors):
    """Until the attempts end."""
    return list(itertools.takewhile(lambda d: d is not None, map(attempts.delay, errors)))


def test_delays_grow_and_attempts_are_counted():
    waits = delays(Attempts(NO_LIMIT, None, Throttle()), itertools.repeat(GONE))
    assert len(waits) == Attempts.MAX_FAILURES - 1
    for wait, base in zip(waits, (0.1, 0.2, 0.4, 0.8), strict=True):
        assert 0.75 * base <= wait <= 1.25 * base


def test_a_hint_is_never_undercut():
    for _ in range(50):
        (first, *_) = delays(Attempts(NO_LIMIT, None, Throttle()), [FULL])
        assert 0.5 <= first <= 0.625


def test_waits_of_a_second_are_logged_for_people_and_shorter_ones_for_debugging(caplog):
    caplog.set_level(logging.DEBUG, "dorad")
    attempts = UploadAttempts(NO_LIMIT, None, size=1)
    gone = dorad.Unavailable("gone", code="UNAVAILABLE", retryable=True)
    waits = [attempts.delay(gone) for _ in range(5)] + delays(
        Attempts(NO_LIMIT, None, Throttle()), [FULL]
    )
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.INFO if wait >= 1 else logging.DEBUG for wait in waits]
    assert set(levels) == {logging.INFO, logging.DEBUG}
    assert caplog.messages[0] == "UNAVAILABLE: gone; trying again in 0.1 s"


def test_an_upload_ends_when_it_is_of_no_use_to_come_back():
    attempts = UploadAttempts(NO_LIMIT, None, size=1)
    assert attempts.delay(dorad.Unavailable("gone", code="UNAVAILABLE")) is None
    assert attempts.delay(FULL) >= 0.5


def test_nothing_is_sent_again_that_the_deadline_would_end():
    assert delays(Attempts(Budget(0.4), None, Throttle()), [FULL]) == []


def test_a_call_without_an_end_waits_for_room_and_for_a_server_that_is_gone():
    attempts = Attempts(NO_LIMIT, math.inf)
    assert len(delays(attempts, [FULL] * 100)) == 100
    assert len(delays(attempts, [GONE] * 100)) == 100
    assert delays(Attempts(NO_LIMIT, 0.0), [FULL]) == []
    assert delays(Attempts(NO_LIMIT, 0.0), [GONE]) == []


def test_many_failures_stop_all_retries_and_successes_bring_them_back():
    throttle = Throttle()
    sent = sum(
        len(delays(Attempts(NO_LIMIT, None, throttle), itertools.repeat(GONE))) for _ in range(100)
    )
    assert sent == 40  # of the 49 failures that leave more than half of the tokens
    assert delays(Attempts(NO_LIMIT, None, throttle), [GONE]) == []
    for _ in range(104):
        Attempts(NO_LIMIT, None, throttle).answered()
    assert len(delays(Attempts(NO_LIMIT, None, throttle), [GONE])) == 1


def test_an_answer_counts_once_as_a_success():
    throttle = Throttle()
    for _ in range(60):
        throttle.failed()
    attempts = Attempts(NO_LIMIT, None, throttle)
    for _ in range(1000):  # messages
        attempts.answered()
    assert delays(Attempts(NO_LIMIT, None, throttle), [GONE]) == []


def test_the_timeout_spans_all_attempts(server):
    server.refuse_generate = [overloaded(0.3)] * 20
    with dorad.Client(server.target) as client, pytest.raises(dorad.Overloaded):
        client.generate([1], timeout=2.8)
    assert 2 <= len(server.generate_calls) <= 10


def test_a_connection_may_take_longer_than_the_first_backoff(server):
    """On a far or busy machine. gRPC's minimum of a backoff is also the time for a handshake."""
    with (
        BadNetwork(server.target, Toxic(latency=0.5)) as network,
        dorad.Client(network.target, timeout=60, retry_for=0) as client,
    ):
        assert client.generate([1], max_tokens=1)


def test_a_stream_is_sent_again_before_its_first_message(client, server):
    server.refuse_generate = [unavailable, overloaded(0.01)]
    with client.stream([1], max_tokens=2) as stream:
        assert sum(len(delta.token_ids) for delta in stream) == 2
    assert len(server.generate_calls) == 3


def test_an_asynchronous_stream_is_sent_again_before_its_first_message(server):
    server.refuse_generate = [unavailable, overloaded(0.01)]

    async def body():
        async with (
            dorad.aio.Client(server.target, timeout=20) as client,
            client.stream([1], max_tokens=2) as stream,
        ):
            return sum([len(delta.token_ids) async for delta in stream])

    assert asyncio.run(body()) == 2
    assert len(server.generate_calls) == 3


def test_closing_a_stream_ends_its_wait(client, server):
    server.refuse_generate = [overloaded(10)]
    stream = client.stream([1])
    threading.Timer(0.2, stream.close).start()
    assert list(stream) == []
    assert len(server.generate_calls) == 1


def test_closing_an_asynchronous_stream_ends_its_wait(server):
    server.refuse_generate = [overloaded(10)]

    async def body():
        async with dorad.aio.Client(server.target, timeout=20) as client:
            stream = client.stream([1])
            asyncio.get_running_loop().call_later(0.2, stream.close)
            return await read(stream)

    assert asyncio.run(body()) == []
    assert len(server.generate_calls) == 1


CALLS = {
    "generate": lambda client: client.generate([1]),
    "generate_many": lambda client: client.generate_many([[1]]),
    "stream": lambda client: list(client.stream([1])),
}


@pytest.mark.parametrize("kind", CALLS)
def test_closing_the_client_ends_its_waits(server, kind):
    server.refuse_generate = [overloaded(10 if kind == "generate" else 1)]
    client = dorad.Client(server.target, timeout=20)
    errors = []

    def call():
        try:
            CALLS[kind](client)
        except dorad.DoradError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    wait_until(lambda: len(server.generate_calls) == 1)
    time.sleep(0.1)
    client.close()
    thread.join(60)
    assert not thread.is_alive() and isinstance(errors[0], dorad.Overloaded)
    assert len(server.generate_calls) == 1


@pytest.mark.parametrize("kind", CALLS)
def test_a_closed_client_begins_no_calls(server, kind):
    client = dorad.Client(server.target, timeout=20)
    client.close()
    with pytest.raises(dorad.Cancelled, match="closed"):
        CALLS[kind](client)
    with pytest.raises(dorad.Cancelled, match="closed"):
        client.publish("a", tensors={"w": np.zeros(1, np.float32)}, config={})
    assert server.generate_calls == []


async def read(stream):
    return [delta async for delta in stream]


@pytest.mark.parametrize("streams", [False, True])
def test_closing_an_asynchronous_client_ends_its_waits(server, streams):
    server.refuse_generate = [overloaded(1 if streams else 10)]

    async def body():
        client = dorad.aio.Client(server.target, timeout=20)
        todo = read(client.stream([1])) if streams else client.generate([1])
        call = asyncio.create_task(todo)
        await asyncio.to_thread(wait_until, lambda: len(server.generate_calls) == 1)
        await asyncio.sleep(0.1)
        await client.close()
        with pytest.raises(dorad.Overloaded):
            await asyncio.wait_for(call, 60)

    asyncio.run(body())


def test_a_cancelled_task_ends_also_when_its_stream_was_closed(server):
    server.endless, server.token_delay = True, 0.005

    async def body():
        async with dorad.aio.Client(server.target, timeout=20) as client:
            stream = client.stream([1])
            task = asyncio.create_task(read(stream))
            await asyncio.sleep(0.2)
            stream.close()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(body())


def test_an_attempt_that_meets_the_one_before_it_is_sent_again(client, server):
    def in_use(context):
        fail(context, grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_IN_USE", "it runs")

    server.refuse_generate = [unavailable, in_use]
    assert len(client.generate([1], request_id="mine", max_tokens=1)) == 1
    assert len(server.generate_calls) == 3
    server.refuse_generate = [in_use]  # somebody else's
    with pytest.raises(dorad.Conflict):
        client.generate([1], request_id="mine")


def test_a_watch_does_not_begin_again_by_itself(client, server):
    server.break_watches = 1
    with pytest.raises(dorad.Unavailable), client.watch() as events:
        next(events)
    assert server.watches == 1


def test_what_may_have_had_an_effect_is_not_sent_again(client, server):
    client.close()
    with dorad.Client("127.0.0.1:1") as nobody:
        with pytest.raises(dorad.Unavailable) as once:
            nobody.activate("a", 1)
        assert "attempts" not in str(once.value)
        with pytest.raises(dorad.Unavailable, match="attempts"):
            nobody.adapters()
