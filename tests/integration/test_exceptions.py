"""What is thrown in a callback of gRPC, or stops the engine, does not leave a caller waiting."""

import threading
import time

import grpc
import pytest
from dorad.v1 import adapters_pb2, control_pb2, inference_pb2
from lib.server import Server, command, is_idle, serve, start, wait_until
from lib.wire import STREAM, failure, generate_request, pack_ids

PROMPT = [11, 12, 13, 14, 15]
FAMILY = "slow"
# Far beyond what an answer takes: who waits for this long hangs.
PATIENCE = 30.0
EXIT_SOFTWARE = 70


def generate(server: Server, zoo) -> None:
    # So many that they cannot all come as one message, however slow the response executor is.
    request = generate_request(PROMPT, adapter="a", max_tokens=300, ignore_eos=True, mode=STREAM)
    for _ in server.wire.inference.Generate(request, timeout=PATIENCE):
        pass


def score(server: Server, zoo) -> None:
    server.wire.score([PROMPT], ["a"], timeout=PATIENCE)


def publish(server: Server, zoo) -> None:
    server.wire.publish("new", zoo.adapter(FAMILY, "lora"), timeout=PATIENCE)


def watch(server: Server, zoo) -> None:
    request = adapters_pb2.WatchRequest(from_generation=0)
    next(server.wire.adapters.Watch(request, timeout=PATIENCE))


def activate(server: Server, zoo) -> None:
    request = adapters_pb2.ActivateRequest(name="a", version=1)
    server.wire.adapters.Activate(request, timeout=PATIENCE)


def pause(server: Server, zoo) -> None:
    server.wire.control.Pause(
        control_pb2.PauseRequest(adapter="none", allow_missing=True), timeout=PATIENCE
    )


def serve_with(zoo, failpoint: str):
    settings = {"engine.kv_bytes": 64 << 20, "engine.prefix_cache": False}
    adapters = {"a": zoo.adapter(FAMILY, "dora")}
    return serve(zoo.model(FAMILY), adapters, settings, DORAD_FAILPOINT=failpoint)


def publishes(server: Server) -> float:
    return sum(
        value
        for key, value in server.metrics().items()
        if key.startswith("dorad_rpc_started_total{") and "Publish" in key
    )


CASES = [
    ("rpc_handler", generate),
    ("rpc_handler", score),
    ("rpc_handler", publish),
    ("rpc_handler", watch),
    ("rpc_handler", activate),
    ("rpc_read_done", publish),
    ("rpc_read_done:2", publish),
    ("rpc_write_done", generate),
    ("rpc_write_done:2", generate),
    ("rpc_pump", watch),
    ("rpc_pump", generate),
    ("rpc_pump:2", generate),
    ("rpc_answer", score),
    ("rpc_answer", publish),
    ("rpc_answer", activate),
    ("rpc_answer", pause),
]


@pytest.mark.parametrize(
    "point, call", CASES, ids=[f"{point}-{call.__name__}" for point, call in CASES]
)
def test_an_exception_ends_its_call_with_internal_and_no_other(zoo, point: str, call) -> None:
    with serve_with(zoo, f"{point}=throw") as server:
        with pytest.raises(grpc.RpcError) as caught:
            call(server, zoo)
        refusal = failure(caught.value)
        assert refusal.code == grpc.StatusCode.INTERNAL, refusal
        assert refusal.reason == "INTERNAL_ERROR" and "failpoint" not in refusal.message
        assert "exception in a call" in server.log()
        wait_until(lambda: is_idle(server), what="an idle engine")
        call(server, zoo)  # the next one is served
        wait_until(lambda: is_idle(server), what="an idle engine")
        # Ends its drain at once: no call is left behind.
        assert server.stop(timeout=15) == 0


@pytest.mark.parametrize("kind", ["generate", "score", "publish", "watch"])
def test_an_exception_while_a_call_is_cancelled_leaves_nothing_behind(zoo, kind: str) -> None:
    with serve_with(zoo, "rpc_cancel=throw") as server:
        wire = server.wire
        if kind == "generate":
            call = wire.stream(PROMPT, adapter="a", max_tokens=4000, ignore_eos=True)
            next(call)
        elif kind == "score":
            call = wire.inference.Score.future(
                inference_pb2.ScoreRequest(
                    sequences=[inference_pb2.TokenSequence(token_ids=pack_ids([7] * 4000))] * 4,
                    adapters=["a", ""],
                )
            )
            wait_until(lambda: wire.info().engine.running_sequences, what="a running score")
        elif kind == "publish":
            never = threading.Event()

            def parts():
                begin = adapters_pb2.PublishBegin(
                    name="half", adapter_config_json="{}", safetensors_size=8 << 20
                )
                yield adapters_pb2.PublishRequest(begin=begin)
                never.wait(60)

            call = wire.adapters.Publish.future(parts())
            wait_until(lambda: publishes(server) == 1, what="the upload to begin")
        else:
            call = wire.adapters.Watch(adapters_pb2.WatchRequest(from_generation=0))
            next(call)
        call.cancel()
        if kind == "publish":
            never.set()
        wait_until(lambda: "exception in a call" in server.log(), what="the exception")
        wait_until(lambda: is_idle(server), what="an idle engine")
        generate(server, zoo)
        assert server.stop(timeout=15) == 0


def test_an_engine_that_hangs_ends_the_process(zoo, tmp_path) -> None:
    settings = {"engine.kv_bytes": 64 << 20, "engine.watchdog_seconds": 5}
    line = command(zoo.model(FAMILY), None, settings)
    server = start(line, tmp_path / "server.log", DORAD_FAILPOINT="engine_step:20=hang")
    try:
        begin = time.monotonic()
        call = server.wire.stream(PROMPT, max_tokens=4000, ignore_eos=True, timeout=60)
        with pytest.raises(grpc.RpcError) as caught:
            for _ in call:
                pass
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert server.process.wait(60) == EXIT_SOFTWARE
        assert time.monotonic() - begin > 5, "the engine was given no time"
        assert "the engine makes no progress" in server.log()
    finally:
        server.wire.close()
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
