"""Over a bad network calls end in order or with the right status: none hangs, none is mixed up."""

import threading
import time

import dorad
import grpc
import pytest
from dorad.v1 import adapters_pb2, types_pb2
from lib.server import Server, command, is_idle, serve, start, wait_until
from lib.toxics import BadNetwork, Toxic
from lib.wire import CHUNK, Wire, failure, publish_parts

PROMPT = [11, 12, 13, 14, 15]
PATIENCE = 60.0
BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL)


@pytest.fixture(scope="module")
def server(zoo):
    adapters = {"a": zoo.adapter("slow", "dora")}
    settings = {"engine.kv_bytes": 128 << 20, "engine.prefix_cache": False}
    with serve(zoo.model("slow"), adapters, settings) as running:
        yield running


@pytest.fixture(scope="module")
def image(zoo) -> tuple[str, bytes]:
    folder = zoo.adapter("slow", "dora_r64")
    config = (folder / "adapter_config.json").read_text()
    return config, (folder / "adapter_model.safetensors").read_bytes()


SLOW_BUT_WHOLE = {
    "latency": Toxic(latency=0.05, jitter=0.05),
    "bandwidth": Toxic(bandwidth=2e6),
    "slicer": Toxic(slice=400),
    "all": Toxic(latency=0.002, bandwidth=4e6, slice=3000),
}


@pytest.mark.parametrize("name", SLOW_BUT_WHOLE)
def test_a_slow_network_changes_nothing(server: Server, image, name: str) -> None:
    options = dict(adapter="a", max_tokens=40, ignore_eos=True, seed=3)
    expected = server.wire.generate(PROMPT, **options)[0].tokens
    with BadNetwork(server.grpc, SLOW_BUT_WHOLE[name]) as network:
        wire = Wire(network.target)
        assert wire.generate(PROMPT, mode=2, timeout=PATIENCE, **options)[0].tokens == expected
        published = wire.publish_bytes(f"net-{name}", *image, timeout=PATIENCE).adapter
        assert published.digest == server.wire.publish_bytes("direct", *image).adapter.digest
        wire.close()
    wait_until(lambda: is_idle(server), what="an idle engine")


@pytest.mark.parametrize("how", ["reset_after", "close_after"])
@pytest.mark.parametrize("size", [1, 20, 60, 200, 350, 500])
def test_a_connection_that_breaks_ends_its_calls(server: Server, how: str, size: int) -> None:
    with BadNetwork(server.grpc, Toxic(**{how: size})) as network:
        wire = Wire(network.target)
        with pytest.raises(grpc.RpcError) as caught:
            # Longer than the connection lives: requests follow until it breaks.
            while True:
                wire.generate(PROMPT, adapter="a", max_tokens=2, ignore_eos=True, timeout=PATIENCE)
        assert caught.value.code() in BROKEN, caught.value
        wire.close()
    wait_until(lambda: is_idle(server), what="an idle engine")


def test_a_network_that_falls_silent_ends_by_the_callers_deadline(server: Server) -> None:
    with BadNetwork(server.grpc, Toxic(silent_after=400)) as network:
        wire = Wire(network.target)
        begin = time.monotonic()
        with pytest.raises(grpc.RpcError) as caught:
            while True:
                wire.generate(PROMPT, adapter="a", max_tokens=2, ignore_eos=True, timeout=2)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert time.monotonic() - begin < PATIENCE
        # The caller's RST_STREAM never comes; the server knows the deadline itself.
        wait_until(lambda: is_idle(server), what="an idle engine")
        wire.close()


CUTS = [1, 100, 1000, 20_000, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 70_000]


@pytest.mark.parametrize("cut", CUTS)
def test_an_upload_cut_anywhere_publishes_nothing(server: Server, image, cut: int) -> None:
    config, weights = image
    assert len(weights) > max(CUTS)
    before = server.rss()
    begin = adapters_pb2.PublishBegin(
        name="cut", adapter_config_json=config, safetensors_size=len(weights)
    )
    with BadNetwork(server.grpc, Toxic(reset_after=cut)) as network:
        wire = Wire(network.target)
        with pytest.raises(grpc.RpcError) as caught:
            wire.adapters.Publish(publish_parts(begin, weights), timeout=PATIENCE)
        assert caught.value.code() in BROKEN, caught.value
        wire.close()
    with pytest.raises(grpc.RpcError) as caught:
        server.wire.adapter("cut")
    assert failure(caught.value).reason == "ADAPTER_NOT_FOUND"
    states = {item.state for item in server.wire.list_adapters()}
    assert states <= {types_pb2.ADAPTER_STATE_READY}
    assert server.metric("dorad_adapter_idle_uploads") == 0
    assert server.rss() - before < 32 << 20


CLIENTS = 64


def test_a_restart_is_not_followed_by_a_storm_of_retries(zoo, tmp_path) -> None:
    """64 clients of the library lose their server in the middle of their calls. All calls end, and
    the new server sees at most the attempts that the client's retry policy allows."""
    adapters = {"a": zoo.adapter("slow", "dora")}
    settings = {
        "engine.kv_bytes": 256 << 20,
        "limits.max_queued_requests": 16,
        "engine.max_running_sequences": 8,
    }
    first = start(command(zoo.model("slow"), adapters, settings), tmp_path / "first.log")
    settings["server.grpc_listen"] = first.grpc
    done: list[str] = []
    running = threading.Semaphore(0)

    def call() -> None:
        with dorad.Client(first.grpc, timeout=PATIENCE) as client:
            running.release()
            try:
                client.generate(PROMPT, adapter="a", max_tokens=150, ignore_eos=True)
                done.append("OK")
            except dorad.DoradError as error:
                done.append(type(error).__name__)

    threads = [threading.Thread(target=call) for _ in range(CLIENTS)]
    try:
        for thread in threads:
            thread.start()
        for _ in threads:
            running.acquire()
        wait_until(lambda: first.wire.info().engine.running_sequences > 0, what="running calls")
        first.process.kill()
        first.process.wait()
        first.wire.close()
        second = start(command(zoo.model("slow"), adapters, settings), tmp_path / "second.log")
        try:
            for thread in threads:
                thread.join(2 * PATIENCE)
                assert not thread.is_alive(), "a call hangs"
            assert len(done) == CLIENTS
            wait_until(lambda: is_idle(second), what="an idle engine")
            attempts = sum(
                value
                for key, value in second.metrics().items()
                if key.startswith("dorad_rpc_started_total{") and '"Generate"' in key
            )
            assert attempts <= 5 * CLIENTS
            (sample,) = second.wire.generate(PROMPT, adapter="a", max_tokens=3, ignore_eos=True)
            assert len(sample.tokens) == 3
            second.wire.close()
            assert second.stop() == 0
        finally:
            if second.process.poll() is None:
                second.process.kill()
                second.process.wait()
    finally:
        if first.process.poll() is None:
            first.process.kill()
            first.process.wait()
