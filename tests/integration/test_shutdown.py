"""Starting and stopping: the ready line, ports, drains, exit codes."""

import os
import signal
import socket
import subprocess
import threading
import time
import urllib.request

import grpc
import pytest
from dorad.v1 import adapters_pb2, inference_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from lib.server import binary, command, environment, serve, start, wait_until
from lib.toxics import BadNetwork, Toxic
from lib.wire import ABORTED, LENGTH, Wire, collect, failure, pack_ids

PROMPT = [11, 12, 13, 14, 15]


@pytest.fixture
def slow(zoo, tmp_path):
    """A server that the test ends itself."""
    servers = []

    def run(**settings):
        settings = {"engine.kv_bytes": 256 << 20} | settings
        line = command(zoo.model("slow"), {"a": zoo.adapter("slow", "dora")}, settings)
        servers.append(start(line, tmp_path / f"server{len(servers)}.log"))
        return servers[-1]

    yield run
    for server in servers:
        server.wire.close()
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def run_to_end(line: list[str], timeout: float = 60) -> subprocess.CompletedProcess:
    return subprocess.run(line, capture_output=True, text=True, timeout=timeout, env=environment())


def test_sigterm_lets_running_requests_finish(slow) -> None:
    server = slow()
    call = server.wire.stream(PROMPT, adapter="a", max_tokens=150, ignore_eos=True)
    messages = [next(call)]
    os.kill(server.pid, signal.SIGTERM)

    def refusal():
        try:
            server.wire.generate(PROMPT, max_tokens=1, timeout=30)
        except grpc.RpcError as error:
            return failure(error)
        return None

    assert wait_until(refusal, what="new requests to be refused").code == (
        grpc.StatusCode.UNAVAILABLE
    )
    (sample,) = collect([*messages, *call]).values()
    assert sample.reason == LENGTH and len(sample.tokens) == 150
    assert server.process.wait(20) == 0


def test_sigint_ends_an_idle_server_at_once(slow) -> None:
    server = slow()
    os.kill(server.pid, signal.SIGINT)
    assert server.process.wait(20) == 0


def test_drain_is_bounded(slow) -> None:
    server = slow(**{"server.drain_timeout_seconds": 0.5})
    call = server.wire.stream(PROMPT, max_tokens=8000, ignore_eos=True)
    next(call)
    os.kill(server.pid, signal.SIGTERM)
    *_, last = call
    assert last.finish.reason == ABORTED, "what is cut off keeps its tokens and says so"
    assert server.process.wait(20) == 0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_ends_requests_with_what_they_have(slow, second: signal.Signals) -> None:
    server = slow(**{"server.drain_delay_seconds": 60})
    call = server.wire.stream(PROMPT, max_tokens=8000, ignore_eos=True)
    messages = [next(call)]
    os.kill(server.pid, signal.SIGTERM)
    time.sleep(0.3)
    assert server.process.poll() is None, "the running request was not waited for"
    os.kill(server.pid, second)
    (sample,) = collect([*messages, *call]).values()
    assert sample.reason == ABORTED and sample.tokens
    assert server.process.wait(20) == 128 + second


def health(server) -> health_pb2_grpc.HealthStub:
    return health_pb2_grpc.HealthStub(server.wire.channel)


@pytest.mark.parametrize("service", ["", "dorad.v1.InferenceService", "readiness"])
def test_requests_are_taken_while_balancers_learn_of_the_end(slow, service: str) -> None:
    server = slow(**{"server.drain_delay_seconds": 200})
    request = health_pb2.HealthCheckRequest(service=service)
    watch = health(server).Watch(request, timeout=30)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    os.kill(server.pid, signal.SIGTERM)
    assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
    # Still within the delay.
    (sample,) = server.wire.generate(PROMPT, adapter="a", max_tokens=2, ignore_eos=True)
    assert sample.reason == LENGTH
    reply = health(server).Check(request, timeout=10)
    assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING
    alive = health(server).Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=10)
    assert alive.status == health_pb2.HealthCheckResponse.SERVING
    os.kill(server.pid, signal.SIGTERM)
    assert server.process.wait(60) == 128 + signal.SIGTERM


def test_refusals_say_when_to_try_again(slow) -> None:
    server = slow()
    call = server.wire.stream(PROMPT, max_tokens=8000, ignore_eos=True)
    next(call)
    os.kill(server.pid, signal.SIGTERM)

    def refusal():
        try:
            server.wire.generate(PROMPT, max_tokens=1, timeout=30)
        except grpc.RpcError as error:
            return error
        return None

    error = wait_until(refusal, what="new requests to be refused")
    assert failure(error).reason == "SHUTTING_DOWN"
    assert failure(error).retry_after == 1
    assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"
    call.cancel()
    assert server.process.wait(20) == 0


def test_a_client_that_does_not_take_its_answer_is_cut_off_in_time(zoo, tmp_path) -> None:
    """gRPC waits for what it has begun to write, but not beyond the end's time."""
    settings = {"engine.kv_bytes": 64 << 20, "server.drain_timeout_seconds": 1}
    server = start(command(zoo.model("llama2"), None, settings), tmp_path / "server.log")
    try:
        # Which takes twenty seconds for the answer.
        with BadNetwork(server.grpc, Toxic(bandwidth=1_000_000)) as network:
            wire = Wire(network.target)
            ids = inference_pb2.TokenSequence(token_ids=pack_ids([7] * 180))
            request = inference_pb2.ScoreRequest(sequences=[ids] * 500, top_k=20)
            call = wire.inference.Score.future(request, timeout=60)
            ended = 'dorad_rpc_handled_total{code="OK",method="Score"'
            wait_until(lambda: ended in server.metrics_text(), 60, "the answer")
            os.kill(server.pid, signal.SIGTERM)
            with pytest.raises(grpc.RpcError) as caught:
                call.result()
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            assert server.process.wait(30) == 0
            wire.close()
    finally:
        server.wire.close()
        server.process.kill()
        server.process.wait()
    assert "changes of the registry" not in server.log(), "there is no store to wait for"


def test_sigterm_before_it_serves_ends_it_at_once(zoo, tmp_path) -> None:
    adapters = {f"a{i}": zoo.adapter("slow", "dora") for i in range(200)}
    line = command(zoo.model("slow"), adapters)
    log = tmp_path / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=out, env=environment())
    try:
        while "adapter loaded" not in log.read_text():  # wait_until looks too seldom.
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        output = process.communicate()[0]
    assert b"ready" not in output
    assert "asked to end before serving" in log.read_text()


def test_sigterm_while_adapters_load(slow, zoo) -> None:
    """What was taken is loaded and answered; what comes later is refused."""
    server = slow()
    folder = zoo.adapter("slow", "dora")
    results = []

    def publish(name: str) -> None:
        try:
            server.wire.publish(name, folder)
            results.append("published")
        except grpc.RpcError as error:
            results.append(failure(error).reason or error.code())

    threads = [threading.Thread(target=publish, args=(f"b{i}",)) for i in range(24)]
    for thread in threads:
        thread.start()
    wait_until(lambda: "published" in results, what="a load")
    os.kill(server.pid, signal.SIGTERM)
    assert server.process.wait(30) == 0
    for thread in threads:
        thread.join(30)
    assert len(results) == len(threads)
    assert set(results) <= {"published", "SHUTTING_DOWN", grpc.StatusCode.UNAVAILABLE}


def test_readiness_ends_when_draining(slow) -> None:
    server = slow()
    ready = server.metrics_url.replace("/metrics", "/readyz")
    assert urllib.request.urlopen(ready, timeout=30).status == 200
    call = server.wire.stream(PROMPT, max_tokens=8000, ignore_eos=True)
    next(call)
    os.kill(server.pid, signal.SIGTERM)

    def refused() -> bool:
        try:
            return urllib.request.urlopen(ready, timeout=30).status != 200
        except urllib.error.HTTPError as error:
            return error.code == 503

    wait_until(refused, what="readiness to end")
    call.cancel()
    assert server.process.wait(20) == 0


def test_watchers_learn_of_the_end(slow) -> None:
    server = slow()
    watch = server.wire.adapters.Watch(adapters_pb2.WatchRequest(), timeout=60)
    watch.initial_metadata()
    os.kill(server.pid, signal.SIGTERM)
    with pytest.raises(grpc.RpcError) as caught:
        next(watch)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert server.process.wait(20) == 0


@pytest.mark.parametrize("key", ["server.grpc_listen", "server.metrics_listen"])
def test_port_in_use_is_one_clear_line(zoo, key: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = run_to_end(command(zoo.model("llama2"), None, {key: f"127.0.0.1:{port}"}))
    assert run.returncode not in (0, -signal.SIGABRT, -signal.SIGSEGV)
    assert "ready" not in run.stdout
    assert str(port) in run.stderr


def test_many_stops_while_requests_arrive(zoo, tmp_path) -> None:
    """Requests race with the end: each ends well or is refused, and the exit is clean."""
    for _ in range(3):
        with serve(zoo.model("llama2"), {"a": zoo.adapter("llama2", "dora")}) as server:
            codes, stop = [], threading.Event()

            def hammer(server=server, codes=codes, stop=stop) -> None:
                while not stop.is_set():
                    try:
                        server.wire.generate(PROMPT, adapter="a", max_tokens=5, ignore_eos=True)
                        codes.append(grpc.StatusCode.OK)
                    except grpc.RpcError as error:
                        codes.append(error.code())
                        return

            threads = [threading.Thread(target=hammer) for _ in range(4)]
            for thread in threads:
                thread.start()
            wait_until(lambda codes=codes: len(codes) > 8, what="requests to flow")
            os.kill(server.pid, signal.SIGTERM)
            assert server.process.wait(20) == 0
            stop.set()
            for thread in threads:
                thread.join(20)
            # gRPC itself resets a call that arrives in the instant of closing: CANCELLED.
            refused = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
            assert set(codes) <= {grpc.StatusCode.OK} | refused


def test_version_and_help() -> None:
    version = run_to_end([str(binary()), "--version"])
    assert version.returncode == 0 and version.stdout.startswith("dorad ")
    usage = run_to_end([str(binary()), "--help"])
    assert usage.returncode == 0
    assert all(word in usage.stdout for word in ("serve", "check-config", "--model", "--adapter"))
