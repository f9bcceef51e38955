"""How requests end before their time, wait in the queue, and freeze while the server pauses."""

import signal
import threading
import time

import grpc
import pytest
from dorad.v1 import control_pb2, inference_pb2
from lib.server import Server, is_idle, serve, wait_until
from lib.wire import ABORTED, LENGTH, collect, failure, generate_request

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
LONG = 4000


@pytest.fixture(scope="module")
def slow(zoo):
    """A model whose requests last for seconds."""
    folders = {"a": zoo.adapter("slow", "dora"), "b": zoo.adapter("slow", "lora")}
    with serve(zoo.model("slow"), folders, {"engine.kv_bytes": 512 << 20}) as running:
        yield running


def greedy(server: Server, tokens: int, **options) -> list[int]:
    options = dict(temperature=0.0, max_tokens=tokens, ignore_eos=True) | options
    return server.wire.generate(PROMPT, **options)[0].tokens


def started(server: Server, prompt=PROMPT, **options):
    """A running stream, after its first message."""
    options = dict(max_tokens=LONG, ignore_eos=True, seed=1) | options
    call = server.wire.stream(prompt, **options)
    return call, [next(call)]


def finish(call, messages) -> dict:
    return collect([*messages, *call])


def assert_idle(server: Server) -> None:
    wait_until(lambda: is_idle(server), what="an idle engine")


# --- Ending requests.


def test_abort_by_id_returns_the_tokens_so_far(slow: Server) -> None:
    call, messages = started(slow, request_id="the-one", adapter="a")
    other, other_messages = started(slow, request_id="another", max_tokens=40)
    assert slow.wire.abort("the-one", "unknown-id") == 1
    (sample,) = finish(call, messages).values()
    assert sample.reason == ABORTED and 0 < len(sample.tokens) < LONG
    assert sample.finish.detail
    assert finish(other, other_messages)[0].reason == LENGTH
    assert_idle(slow)


@pytest.mark.parametrize("target", ["a", "a@1"])
def test_abort_by_adapter_spares_others(slow: Server, target: str) -> None:
    victims = [started(slow, adapter="a") for _ in range(2)]
    bystander = started(slow, adapter="b", max_tokens=60)
    request = inference_pb2.AbortRequest(adapter=target)
    assert slow.wire.inference.Abort(request, timeout=10).aborted == 2
    assert all(finish(*victim)[0].reason == ABORTED for victim in victims)
    assert finish(*bystander)[0].reason == LENGTH


def test_abort_all_ends_scores_too(slow: Server) -> None:
    calls = [started(slow, adapter=name) for name in ("", "a", "b")]
    errors = []

    def score() -> None:
        try:
            slow.wire.score([[5] * 8000] * 8, ["a", "b"])
        except grpc.RpcError as error:
            errors.append(failure(error))

    thread = threading.Thread(target=score)
    thread.start()
    wait_until(lambda: slow.wire.info().engine.running_sequences > 3, what="the score to run")
    slow.wire.inference.Abort(inference_pb2.AbortRequest(all=True), timeout=10)
    thread.join(20)
    assert errors and errors[0].code == grpc.StatusCode.ABORTED
    assert all(finish(*call)[0].reason == ABORTED for call in calls)
    assert_idle(slow)


def test_cancel_frees_everything(slow: Server) -> None:
    calls = [started(slow, adapter="a", n=4) for _ in range(4)]
    assert slow.wire.info().engine.adapter_leases == 4
    for call, _ in calls:
        call.cancel()
    assert_idle(slow)


def test_deadline_ends_a_running_request(slow: Server) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        slow.wire.generate(PROMPT, max_tokens=LONG, ignore_eos=True, timeout=0.4)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert_idle(slow)


def test_deadline_ends_a_queued_request(zoo) -> None:
    settings = {"engine.max_running_sequences": 1, "engine.kv_bytes": 256 << 20}
    with serve(zoo.model("slow"), None, settings) as server:
        blocker, _ = started(server)
        with pytest.raises(grpc.RpcError) as caught:
            server.wire.generate(PROMPT, max_tokens=4, timeout=0.4)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        wait_until(lambda: server.wire.info().engine.queued_requests == 0, what="an empty queue")
        blocker.cancel()
        assert_idle(server)


def test_duplicate_request_id_is_refused(slow: Server) -> None:
    call, _ = started(slow, request_id="twin")
    with pytest.raises(grpc.RpcError) as caught:
        slow.wire.generate(PROMPT, max_tokens=2, request_id="twin")
    refusal = failure(caught.value)
    assert refusal.code == grpc.StatusCode.ALREADY_EXISTS
    assert refusal.reason == "REQUEST_ID_IN_USE" and "twin" in refusal.message
    call.cancel()
    assert_idle(slow)
    assert slow.wire.generate(PROMPT, max_tokens=2, request_id="twin", ignore_eos=True)


# --- Queue and order.


def test_full_queue_is_refused_with_a_retry_hint(zoo) -> None:
    settings = {
        "engine.max_running_sequences": 1,
        "limits.max_queued_requests": 3,
        "engine.kv_bytes": 256 << 20,
    }
    with serve(zoo.model("slow"), None, settings) as server:
        blocker, _ = started(server)
        queued = [server.wire.stream(PROMPT, max_tokens=2, ignore_eos=True) for _ in range(3)]
        wait_until(lambda: server.wire.info().engine.queued_requests == 3, what="a full queue")
        with pytest.raises(grpc.RpcError) as caught:
            server.wire.generate(PROMPT, max_tokens=2)
        refusal = failure(caught.value)
        assert refusal.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refusal.reason == "QUEUE_FULL" and refusal.retry_after > 0
        blocker.cancel()
        assert all(collect(call)[0].reason == LENGTH for call in queued)


def test_lower_priority_value_runs_first(zoo) -> None:
    settings = {"engine.max_running_sequences": 1, "engine.kv_bytes": 256 << 20}
    with serve(zoo.model("slow"), None, settings) as server:
        # The blocker outranks the others, or they would take its place.
        blocker, _ = started(server, priority=-100)
        order, threads = [], []

        def run(priority: int) -> None:
            server.wire.generate(PROMPT, max_tokens=20, ignore_eos=True, priority=priority)
            order.append(priority)

        for count, priority in enumerate((5, 0, -5), start=1):
            threads.append(threading.Thread(target=run, args=(priority,)))
            threads[-1].start()
            wait_until(
                lambda wanted=count: server.wire.info().engine.queued_requests == wanted,
                what="the request to queue",
            )
        blocker.cancel()
        for thread in threads:
            thread.join(30)
        assert order == [-5, 0, 5]


# --- Pause.


def test_pause_keep_freezes_and_resumes_with_equal_tokens(slow: Server) -> None:
    options = dict(prompt=PROMPT, max_tokens=80, ignore_eos=True, seed=3)
    (whole,) = slow.wire.generate(**options)
    call = slow.wire.stream(**options)
    messages = [next(call)]
    assert slow.wire.pause(control_pb2.PAUSE_MODE_KEEP) == 1
    info = slow.wire.info().engine
    assert info.paused
    time.sleep(0.2)
    assert slow.wire.info().engine.steps == info.steps, "a step was taken while paused"
    slow.wire.resume()
    (sample,) = finish(call, messages).values()
    assert sample.tokens == whole.tokens
    assert not slow.wire.info().engine.paused


def test_requests_wait_while_paused_by_keep(slow: Server) -> None:
    slow.wire.pause(control_pb2.PAUSE_MODE_KEEP)
    call = slow.wire.inference.Generate(generate_request(PROMPT, max_tokens=3, ignore_eos=True))
    wait_until(lambda: slow.wire.info().engine.queued_requests == 1, what="the request to queue")
    slow.wire.resume()
    assert collect(call)[0].reason == LENGTH


def test_pause_abort_ends_everything(slow: Server) -> None:
    calls = [started(slow) for _ in range(3)]
    assert slow.wire.pause(control_pb2.PAUSE_MODE_ABORT) == 3
    slow.wire.resume()
    assert all(finish(*call)[0].reason == ABORTED for call in calls)
    assert len(greedy(slow, 3)) == 3


def test_pause_wait_lets_running_requests_finish_and_refuses_new_ones(slow: Server) -> None:
    call, messages = started(slow, max_tokens=150)
    pause = slow.wire.control.Pause.future(
        control_pb2.PauseRequest(mode=control_pb2.PAUSE_MODE_WAIT), timeout=60
    )

    def refused():
        try:
            slow.wire.generate(PROMPT, max_tokens=1)
        except grpc.RpcError as error:
            return failure(error)
        return None

    refusal = wait_until(refused, what="a refusal")
    assert refusal.code == grpc.StatusCode.UNAVAILABLE and refusal.reason == "ENGINE_PAUSED"
    assert finish(call, messages)[0].reason == LENGTH
    assert pause.result(timeout=60) is not None
    slow.wire.resume()
    assert len(greedy(slow, 3)) == 3


def test_pause_wait_is_undone_at_its_own_deadline(slow: Server) -> None:
    call, _ = started(slow)
    request = control_pb2.PauseRequest(mode=control_pb2.PAUSE_MODE_WAIT)
    for seconds in (2, 10, 50):  # A busy machine may begin it too late to be seen.
        pause = slow.wire.control.Pause.future(request, timeout=seconds)
        seen = wait_until(
            lambda pause=pause: slow.wire.info().engine.pausing or (pause.done() and "late"),
            what="a pause that waits",
        )
        assert pause.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if seen is True:
            break
    assert seen is True
    wait_until(lambda: not slow.wire.info().engine.pausing, what="the end of the pause")
    assert not slow.wire.info().engine.paused
    assert len(greedy(slow, 3)) == 3
    next(call)  # The awaited request has run on.
    call.cancel()
    assert_idle(slow)


def test_pause_of_one_adapter_leaves_the_others_running(slow: Server, zoo) -> None:
    for name in ("one", "two"):
        slow.wire.publish(name, zoo.adapter("slow", "lora"), activate=True)
    options = dict(prompt=PROMPT, adapter="one", max_tokens=80, ignore_eos=True, seed=3)
    (whole,) = slow.wire.generate(**options)
    call = slow.wire.stream(**options)
    messages = [next(call)]
    assert slow.wire.pause(control_pb2.PAUSE_MODE_KEEP, "one") == 1
    info = slow.wire.info().engine
    assert not info.paused and list(info.paused_adapters) == ["one"] and info.frozen_requests == 1
    # Publishing and activating go on; a new request waits.
    slow.wire.publish("one", zoo.adapter("slow", "lora"), activate=True)
    late = slow.wire.inference.Generate(generate_request(**options | dict(adapter="one@2")))
    for adapter in ("two", ""):
        assert len(greedy(slow, 3, adapter=adapter)) == 3
    assert slow.wire.info().engine.frozen_requests == 2
    slow.wire.resume("one")
    (sample,) = finish(call, messages).values()
    assert sample.tokens == whole.tokens == collect(late)[0].tokens
    assert slow.wire.info().engine.frozen_requests == 0


def test_pause_wait_of_one_adapter_refuses_it_alone(slow: Server, zoo) -> None:
    slow.wire.publish("one", zoo.adapter("slow", "lora"), activate=True)
    assert slow.wire.pause(control_pb2.PAUSE_MODE_WAIT, "one") == 0
    with pytest.raises(grpc.RpcError) as caught:
        slow.wire.generate(PROMPT, adapter="one", max_tokens=1)
    assert failure(caught.value).reason == "ENGINE_PAUSED"
    assert len(greedy(slow, 3)) == 3
    slow.wire.resume()
    assert len(greedy(slow, 3, adapter="one")) == 3


def test_requests_frozen_by_a_pause_of_their_adapter_end_with_the_server(zoo) -> None:
    with serve(zoo.model("slow"), {"one": zoo.adapter("slow", "lora")}) as server:
        call, messages = started(server, adapter="one")
        server.wire.pause(control_pb2.PAUSE_MODE_KEEP, "one")
        server.process.send_signal(signal.SIGTERM)
        assert finish(call, messages)[0].reason == ABORTED
        assert server.process.wait(20) == 0, "it waited for the drain's timeout"
