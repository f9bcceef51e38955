"""Uploads that break: they go on where they stood, are published once, and do not stay for ever."""

import asyncio
import hashlib
import queue
import threading

import dorad
import dorad.aio
import grpc
import pytest
from dorad.v1 import adapters_pb2
from lib.server import Server, serve, wait_until
from lib.toxics import BadNetwork, Toxic
from lib.wire import CHUNK, Wire, failure, publish_parts


@pytest.fixture(scope="module")
def server(zoo):
    with serve(zoo.model("slow")) as running:
        yield running


@pytest.fixture(scope="module")
def adapter(zoo):
    """(configuration, image of several chunks)."""
    folder = zoo.adapter("slow", "dora_r64")
    image = (folder / "adapter_model.safetensors").read_bytes()
    assert len(image) > CHUNK, "an upload of one chunk cannot break in the middle"
    return (folder / "adapter_config.json").read_text(), image


def begin(name: str, adapter, **changes) -> adapters_pb2.PublishBegin:
    """Of an upload whose id is its adapter's name."""
    config, image = adapter
    values = dict(
        name=name,
        adapter_config_json=config,
        safetensors_size=len(image),
        safetensors_sha256=hashlib.sha256(image).digest(),
        upload_id=name,
    )
    return adapters_pb2.PublishBegin(**values | changes)


def refused(call, *args, **kwargs):
    with pytest.raises(grpc.RpcError) as caught:
        call(*args, **kwargs)
    return failure(caught.value)


class Half:
    """A call that has sent Begin and one chunk, and waits."""

    def __init__(self, wire: Wire, message: adapters_pb2.PublishBegin, image: bytes) -> None:
        self.parts: queue.Queue = queue.Queue()
        parts = publish_parts(message, image)
        for _ in range(2):
            self.parts.put(next(parts))
        self.call = wire.adapters.Publish.future(iter(self.parts.get, None), timeout=60)
        wait_until(lambda: self._arrived(wire, message.upload_id), what="the first chunk")

    @staticmethod
    def _arrived(wire: Wire, upload_id: str) -> bool:
        try:
            return wire.upload(upload_id).received_bytes == CHUNK
        except grpc.RpcError:
            return False

    def half_close(self) -> None:
        self.parts.put(None)


def gauges(server: Server) -> tuple[float, float]:
    names = ("dorad_adapter_idle_uploads", "dorad_adapter_idle_upload_bytes")
    return tuple(server.metric(name) for name in names)


@pytest.mark.parametrize("how", ["cancel", "half-close", "connection"])
def test_a_broken_upload_goes_on_where_it_stood(server: Server, adapter, how: str) -> None:
    image, message = adapter[1], begin(f"resume-{how}", adapter)
    wire = Wire(server.grpc)
    half = Half(wire, message, image)
    if how == "cancel":
        half.call.cancel()
    elif how == "half-close":
        half.half_close()
        assert failure(half.call.exception()).reason == "PUBLISH_INCOMPLETE"
    else:
        wire.close()
    wait_until(lambda: gauges(server) == (1, CHUNK), what="the upload to be idle")
    half.half_close()  # lets gRPC's thread go
    kept = server.wire.upload(message.upload_id)
    assert (kept.received_bytes, kept.total_bytes, kept.committed) == (CHUNK, len(image), False)
    assert 0 < kept.time_left.ToTimedelta().total_seconds() <= 600
    done = server.wire.publish_rest(message, image, CHUNK).adapter
    whole = server.wire.publish_bytes(f"whole-{how}", *adapter).adapter
    assert done.version == 1 and done.digest == whole.digest
    assert server.wire.upload(message.upload_id).committed
    assert gauges(server) == (0, 0)
    wire.close()


def test_a_newer_call_takes_over_from_one_that_hangs(server: Server, adapter) -> None:
    image, message = adapter[1], begin("over", adapter)
    half = Half(server.wire, message, image)
    done = server.wire.publish_rest(message, image, CHUNK).adapter
    assert done.version == 1
    lost = failure(half.call.exception())
    assert (lost.code, lost.reason) == (grpc.StatusCode.ABORTED, "UPLOAD_TAKEN_OVER")
    half.half_close()


def test_a_commit_is_answered_again_and_not_published_twice(server: Server, adapter) -> None:
    image, message = adapter[1], begin("once", adapter, activate=True)
    first = server.wire.publish_rest(message, image, 0)
    for offset in (0, len(image)):
        again = server.wire.publish_rest(message, image, offset)
        assert again == first
    assert [item.version for item in server.wire.list_adapters("once")] == [1]


def test_a_refused_adapter_is_refused_again_without_another_load(server: Server, adapter) -> None:
    image, message = adapter[1], begin("bad", adapter, adapter_config_json="{}")
    first = refused(server.wire.publish_rest, message, image, 0)
    assert first.reason == "ADAPTER_CONFIG_MISSING_FIELD"
    again = refused(server.wire.publish_rest, message, image, 0)
    assert again.metadata.pop("request_id") != first.metadata.pop("request_id")
    assert again == first
    assert [item.version for item in server.wire.list_adapters("bad")] == [1]


def test_another_begin_is_refused_and_leaves_the_upload_alone(server: Server, adapter) -> None:
    image, message = adapter[1], begin("differs", adapter)
    half = Half(server.wire, message, image)
    other = begin("differs-2", adapter, upload_id="differs", tags={"step": "1"})
    refusal = refused(server.wire.publish_rest, other, image, CHUNK)
    assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
    assert refusal.reason == "UPLOAD_BEGIN_DIFFERS"
    assert {field for field, _, _ in refusal.violations} == {"name", "tags"}
    half.half_close()
    assert failure(half.call.exception()).reason == "PUBLISH_INCOMPLETE"
    assert server.wire.publish_rest(message, image, CHUNK).adapter.version == 1


def test_goes_on_only_where_it_stands(server: Server, adapter) -> None:
    image, message = adapter[1], begin("offset", adapter)
    half = Half(server.wire, message, image)
    half.half_close()
    half.call.exception()
    for offset in (0, CHUNK - 1):
        refusal = refused(server.wire.publish_rest, message, image, offset)
        assert refusal.reason == "PUBLISH_OFFSET_MISMATCH", refusal
    assert server.wire.upload("offset").received_bytes == CHUNK
    assert server.wire.publish_rest(message, image, CHUNK).adapter.version == 1


def test_wrong_bytes_at_commit_drop_the_upload(server: Server, adapter) -> None:
    image = adapter[1]
    message = begin("wrong", adapter, safetensors_sha256=bytes(32))
    assert refused(server.wire.publish_rest, message, image, 0).reason == "PUBLISH_SHA256_MISMATCH"
    assert refused(server.wire.upload, "wrong").reason == "UPLOAD_NOT_FOUND"
    message = begin("few", adapter)
    message.safetensors_size += 1
    assert refused(server.wire.publish_rest, message, image, 0).reason == "PUBLISH_SIZE_MISMATCH"
    assert refused(server.wire.upload, "few").reason == "UPLOAD_NOT_FOUND"


def test_nothing_is_kept_without_an_id(server: Server, adapter) -> None:
    message = begin("none", adapter)
    message.ClearField("upload_id")
    parts = list(publish_parts(message, adapter[1]))[:2]
    refusal = refused(server.wire.adapters.Publish, iter(parts), timeout=30)
    assert refusal.reason == "PUBLISH_INCOMPLETE"
    assert gauges(server) == (0, 0)


@pytest.mark.parametrize("upload_id", ["", "a" * 129, "a b", "../x", "ä"])
def test_bad_ids_are_refused(server: Server, adapter, upload_id: str) -> None:
    refusal = refused(server.wire.publish_rest, begin("u", adapter, upload_id=upload_id), b"", 0)
    assert refusal.reason == "UPLOAD_ID_INVALID"
    assert refused(server.wire.upload, upload_id).reason == "UPLOAD_ID_INVALID"


def test_an_abandoned_upload_is_dropped_in_time(zoo, adapter) -> None:
    with serve(zoo.model("slow"), None, {"adapters.upload_ttl_seconds": 0.3}) as server:
        half = Half(server.wire, begin("idle", adapter), adapter[1])
        half.half_close()
        half.call.exception()
        server.wire.publish_rest(begin("done", adapter), adapter[1], 0)
        # Nobody asks for the upload itself meanwhile.
        wait_until(lambda: gauges(server) == (0, 0), what="the upload to be dropped")
        assert refused(server.wire.upload, "idle").reason == "UPLOAD_NOT_FOUND"

        def forgotten() -> bool:
            try:
                return not server.wire.upload("done").committed
            except grpc.RpcError:
                return True

        wait_until(forgotten, what="the result to be forgotten")
        assert server.wire.publish_rest(begin("done", adapter), adapter[1], 0).adapter.version == 2


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_the_client_goes_on_through_connections_that_break(
    server: Server, zoo, adapter, kind: str
) -> None:
    folder, size = zoo.adapter("slow", "dora_r64"), len(adapter[1])
    cuts = [Toxic(close_after=after) for after in (size // 5, 1000, size // 4, size // 3)]
    with BadNetwork(server.grpc, cuts) as network:
        if kind == "sync":
            with dorad.Client(network.target, timeout=60) as client:
                done = client.publish(f"broken-{kind}", path=folder)
        else:

            async def publish():
                async with dorad.aio.Client(network.target, timeout=60) as client:
                    return await client.publish(f"broken-{kind}", path=folder)

            done = asyncio.run(publish())
        assert network.connections > len(cuts)
    whole = server.wire.publish_bytes(f"unbroken-{kind}", *adapter).adapter
    assert (done.version, done.digest) == (1, whole.digest)
    assert len(server.wire.list_adapters(f"broken-{kind}")) == 1


def test_the_client_finds_out_what_became_of_a_commit(server: Server, zoo, adapter) -> None:
    folder = zoo.adapter("slow", "dora_r64")
    with BadNetwork(server.grpc, [Toxic(unresponsive_after=len(adapter[1]))]) as network:

        def cut() -> None:
            assert network.broken.wait(30)
            wait_until(lambda: server.wire.list_adapters("lost"), what="the commit")
            network.cut()

        cutter = threading.Thread(target=cut)
        cutter.start()
        with dorad.Client(network.target, timeout=60) as client:
            done = client.publish("lost", path=folder)
        cutter.join()
        assert network.connections >= 2
    assert done.version == 1 and done.state == "ready"
    assert [item.version for item in server.wire.list_adapters("lost")] == [1]


def test_a_server_ends_in_order_with_uploads_kept(zoo, adapter) -> None:
    with serve(zoo.model("slow")) as server:
        half = Half(server.wire, begin("left", adapter), adapter[1])
        half.half_close()
        half.call.exception()
        hanging = Half(server.wire, begin("hanging", adapter), adapter[1])
    hanging.half_close()
    assert hanging.call.exception().code() in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
    )
