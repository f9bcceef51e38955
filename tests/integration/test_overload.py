"""More requests than the server takes: those that it admitted are served, and each of the others is
told at once when to come back. How fast: tests/bench/overload.py."""

import json
import time

import grpc
import pytest
from dorad.v1 import inference_pb2_grpc
from lib.server import Server, serve, wait_until
from lib.wire import LENGTH, STOP, collect, failure, generate_request

PROMPT = [11, 12, 13, 14, 15]
QUEUE = 4
FLOOD = 200


@pytest.fixture(scope="module")
def server(zoo):
    settings = {
        "engine.kv_bytes": 64 << 20,
        "engine.max_running_sequences": 2,
        "limits.max_queued_requests": QUEUE,
    }
    with serve(zoo.model("slow"), None, settings) as running:
        yield running


def full(server: Server) -> list:
    """Calls that hold the engine and its queue until they are cancelled."""
    calls = [
        server.wire.stream(PROMPT, max_tokens=8000, ignore_eos=True, priority=-1) for _ in range(2)
    ]
    for call in calls:
        next(call)
    calls += [server.wire.stream(PROMPT, max_tokens=8, ignore_eos=True) for _ in range(QUEUE)]
    wait_until(lambda: server.wire.info().engine.queued_requests == QUEUE, what="a full queue")
    return calls


def test_a_flood_harms_nobody_who_was_admitted(server: Server) -> None:
    calls = full(server)
    flood = [server.wire.stream(PROMPT, max_tokens=4000) for _ in range(FLOOD)]
    for call in flood:
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        refusal = failure(caught.value)
        assert refusal.code == grpc.StatusCode.RESOURCE_EXHAUSTED and refusal.retry_after > 0
        trailers = dict(call.trailing_metadata())
        assert int(trailers["grpc-retry-pushback-ms"]) == round(1000 * refusal.retry_after)
    engine = server.wire.info().engine
    assert (engine.running_sequences, engine.queued_requests) == (2, QUEUE)
    for call in calls[:2]:
        call.cancel()
    for call in calls[2:]:
        (sample,) = collect(call).values()
        assert sample.reason == LENGTH and len(sample.tokens) == 8


def test_refused_calls_are_sent_again_by_grpc_itself_when_the_server_says(server: Server) -> None:
    """Only a Trailers-Only answer is retried, and the pushback spaces the attempts."""
    attempts = 5  # gRPC's most
    config = {
        "methodConfig": [
            {
                "name": [{"service": "dorad.v1.InferenceService"}],
                "retryPolicy": {
                    "maxAttempts": attempts,
                    "initialBackoff": "0.001s",
                    "maxBackoff": "0.001s",
                    "backoffMultiplier": 1,
                    "retryableStatusCodes": ["RESOURCE_EXHAUSTED"],
                },
            }
        ]
    }
    options = [("grpc.service_config", json.dumps(config)), ("grpc.enable_retries", 1)]
    calls = full(server)

    def refusals() -> float:
        return server.metrics().get(
            'dorad_requests_refused_total{kind="generate",reason="QUEUE_FULL"}', 0
        )

    with grpc.insecure_channel(server.grpc, options=options) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        before, begin = refusals(), time.monotonic()
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(generate_request(PROMPT), timeout=30))
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refusals() - before == attempts
        # The hint is 0.2 s; the client's own backoff would be over after some milliseconds.
        assert time.monotonic() - begin > 0.9 * 0.2 * (attempts - 1)

        # And when there is room again, the call succeeds without its caller's doing.
        request = generate_request(PROMPT, max_tokens=3, ignore_eos=True)
        again = stub.Generate(request, timeout=30)
        wait_until(lambda: refusals() - before > attempts, what="its first refusal")
        for call in calls:
            call.cancel()
        (sample,) = collect(again).values()
        assert sample.reason == LENGTH


def test_a_flood_of_large_prompts_is_refused_by_tokens(zoo) -> None:
    settings = {
        "engine.kv_bytes": 64 << 20,
        "engine.max_running_sequences": 1,
        "limits.max_queued_tokens": 10_000,
    }
    with serve(zoo.model("slow"), None, settings) as server:
        blocker = server.wire.stream(PROMPT, max_tokens=8000, ignore_eos=True, priority=-1)
        next(blocker)
        large = [7] * 4000
        calls = [server.wire.stream(large, max_tokens=1) for _ in range(2)]
        # Calls of one channel may reach the server in another order than they were made in.
        wait_until(lambda: server.wire.info().engine.queued_requests == 2, what="two large prompts")
        # A third would be beyond 10000 tokens.
        codes = []
        for call in [server.wire.stream(large, max_tokens=1) for _ in range(48)]:
            with pytest.raises(grpc.RpcError) as caught:
                next(call)
            codes.append(failure(caught.value).reason)
        assert set(codes) == {"QUEUE_FULL"}
        assert server.wire.info().engine.queued_requests == 2
        blocker.cancel()
        for call in calls:
            assert collect(call)[0].reason in (LENGTH, STOP)
