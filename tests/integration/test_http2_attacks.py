"""Hostile HTTP/2 peers, at a server and at nginx before it: others are served meanwhile.

docs/guides/deployment.md lists what gRPC 1.51 alone cannot withstand. At the bare server those
attacks are smaller here, so that they end.
"""

import socket
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from dorad.v1 import inference_pb2_grpc
from lib import http2_attacks as attacks
from lib.http2_attacks import Target
from lib.nginx import nginx
from lib.server import Server, serve, wait_until
from lib.wire import collect, generate_request

PROMPT = [11, 12, 13, 14, 15]


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@dataclass
class Scene:
    """A server, and where good and bad clients of it connect to."""

    server: Server
    target: Target
    channel: grpc.Channel

    def call(self, max_tokens: int = 2) -> int:
        stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        request = generate_request(PROMPT, max_tokens=max_tokens, ignore_eos=True)
        (sample,) = collect(stub.Generate(request, timeout=60)).values()
        return len(sample.tokens)


@pytest.fixture(scope="module")
def server(zoo):
    with serve(zoo.model("slow"), None, {"engine.kv_bytes": 256 << 20}) as running:
        yield running


@pytest.fixture(scope="module")
def direct(server):
    yield Scene(server, Target(server.grpc, tls=False), server.wire.channel)


@pytest.fixture(scope="module")
def proxied(server):
    # Shorter than deployed, for the tests that wait for them.
    changes = {
        "client_header_timeout 10s;": "client_header_timeout 3s;",
        "keepalive_timeout 60s;": "keepalive_timeout 3s;",
        "\nsend_timeout 60s;": "\nsend_timeout 3s;",
    }
    with nginx([server.grpc], changes) as proxy:
        address = f"127.0.0.1:{proxy.public}"
        with grpc.secure_channel(address, proxy.credentials()) as channel:
            yield Scene(server, Target(address, tls=True), channel)


@pytest.fixture(params=["direct", "proxied"])
def scene(request):
    return request.getfixturevalue(request.param)


def withstand(scene: Scene, attack, cpu_limit: float, figures: list[str] | None = None):
    """Runs attack(target) while a good client calls; what the attack returns.

    The server's process may spend `cpu_limit` seconds of CPU on it, good calls included.
    """
    assert scene.call() == 2
    files = open_files(scene.server.pid)
    before = scene.server.cpu_seconds()
    result, done = [], threading.Event()

    def run() -> None:
        try:
            result.append(attack(scene.target))
        finally:
            done.set()

    thread = threading.Thread(target=run)
    thread.start()
    calls = 0
    while not done.wait(0.05):
        assert scene.call() == 2
        calls += 1
    thread.join()
    assert result, "the attack itself failed"
    assert scene.call() == 2
    wait_until(
        lambda: scene.server.wire.info().engine.running_sequences == 0, 20, "no running sequences"
    )
    wait_until(lambda: open_files(scene.server.pid) <= files + 3, 20, "the connections to close")
    spent = scene.server.cpu_seconds() - before
    if figures is not None:
        name = attack.__name__
        figures.append(f"{name}: {spent:.2f} CPU seconds of the server, {calls} good calls")
    assert spent < cpu_limit, f"{spent:.1f} CPU seconds"
    return result[0]


def sized(scene: Scene, direct: int, proxied: int) -> int:
    return proxied if scene.target.tls else direct


def named(attack, **arguments):
    def run(target: Target):
        return attack(target, **arguments)

    run.__name__ = attack.__name__
    return run


def test_a_header_of_many_megabytes(scene, figures) -> None:
    size = sized(scene, direct=2, proxied=50)
    withstand(scene, named(attacks.header_bomb, megabytes=size), 10, figures)


@pytest.mark.parametrize("acknowledged", [False, True])
@pytest.mark.parametrize("attack", [attacks.metadata_12k, attacks.metadata_40k])
def test_oversized_metadata(scene, attack, acknowledged: bool, figures) -> None:
    withstand(scene, named(attack, acknowledged=acknowledged), 10, figures)


def test_many_tiny_headers(scene, figures) -> None:
    withstand(scene, attacks.many_tiny_headers, 10, figures)


def test_rapid_reset(scene, figures) -> None:
    streams = sized(scene, direct=10_000, proxied=30_000)
    scene.call()
    started = scene.server.metric("dorad_rpc_started_total", method="Generate")
    withstand(scene, named(attacks.rapid_reset, streams=streams), 30, figures)
    started = scene.server.metric("dorad_rpc_started_total", method="Generate") - started
    figures.append(f"rapid_reset: {started:.0f} calls started for {streams} streams")
    if scene.target.tls:
        # keepalive_requests, and the good calls meanwhile.
        assert started < 2000, "the proxy passed on what it should have cut off"


def test_ping_flood(scene, figures) -> None:
    withstand(scene, named(attacks.ping_flood, pings=200_000), 15, figures)


def test_settings_flood(scene, figures) -> None:
    withstand(scene, named(attacks.settings_flood, count=100_000), 15, figures)


def test_empty_data_flood(scene, figures) -> None:
    withstand(scene, named(attacks.empty_data_flood, count=100_000), 15, figures)


def test_half_open_connections(scene, figures) -> None:
    # The bare server keeps those that stop inside a request's head.
    seconds = sized(scene, direct=7, proxied=30)
    attack = named(attacks.half_open, connections=120, closed_within=seconds)
    closed = withstand(scene, attack, 15, figures)
    assert closed or not scene.target.tls, "half-open connections stay open"


def test_a_reader_without_a_window(scene, figures) -> None:
    streams = 20
    # The bare server holds the tokens for as long as the connection lives.
    seconds = sized(scene, direct=5, proxied=60)
    attack = named(attacks.slow_reader, streams=streams, seconds=seconds)
    assert withstand(scene, attack, 60, figures) == sized(scene, direct=0, proxied=streams)


def test_broken_peers(scene, figures) -> None:
    withstand(scene, attacks.broken_peers, 30, figures)


def test_the_metrics_listener_answers_beside_half_open_connections(server) -> None:
    host, port = server.metrics_url.split("/")[2].split(":")
    peers = [socket.create_connection((host, int(port)), 5) for _ in range(20)]
    try:
        for index, peer in enumerate(peers):
            peer.sendall([b"", b"G", b"GET /metrics HTTP/1.1\r\nHost: x\r\n"][index % 3])
        time.sleep(0.1)
        with urllib.request.urlopen(server.metrics_url, timeout=10) as response:
            assert b"dorad_build_info" in response.read()
    finally:
        for peer in peers:
            peer.close()
