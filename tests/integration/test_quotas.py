"""Quotas: a tenant has so many streams, tokens, adapters and pauses, and no more."""

import shutil
import threading
import time
from pathlib import Path

import dorad
import grpc
import numpy as np
import pytest
from dorad.v1 import adapters_pb2
from lib.server import serve, wait_until
from lib.tenants import PROMPT, connections, reason, serve_tenants
from lib.tokens import write_tokens
from lib.wire import Wire, failure, publish_parts

LONG = 2000


@pytest.fixture(scope="module")
def server(zoo, tmp_path_factory):
    with serve_tenants(zoo, tmp_path_factory.mktemp("quotas") / "tokens.yaml") as running:
        yield running


@pytest.fixture
def connect(server):
    with connections(server) as connect:
        yield connect


def test_streams_beyond_the_quota_are_refused_until_one_ends(connect, server) -> None:
    small = connect("small")
    options = {"max_tokens": LONG, "ignore_eos": True}
    with small.stream(PROMPT, **options) as first, small.stream(PROMPT, **options) as second:
        next(iter(first)), next(iter(second))
        with pytest.raises(dorad.Overloaded) as refused:
            small.generate(PROMPT, max_tokens=1)
        assert refused.value.reason == "QUOTA_STREAMS" and refused.value.retry_after > 0
        # What is needed to end one is no stream.
        assert small.info().device
        assert connect("a-worker").generate(PROMPT, max_tokens=1)
    # Cancelled, both: nothing leaks.
    for _ in range(5):
        wait_until(lambda: reason(small.generate, PROMPT, max_tokens=1) == "", what="a free stream")
    assert server.metric("dorad_calls_denied_total", reason="QUOTA_STREAMS") >= 1


def test_a_publish_that_is_cancelled_takes_its_stream_until_its_load_has_ended(
    zoo, tmp_path
) -> None:
    """Or one tenant could fill the line of loads. The load never ends here."""
    path = tmp_path / "tokens.yaml"
    write_tokens(path, {"a": ("t", ["publish"])}, {"t": {"quota": {"streams": 1}}})
    store = tmp_path / "store"
    settings = {
        "security.tokens_file": path,
        "adapters.store_path": store,
        "adapters.allowed_roots": f"[{zoo.directory}]",
        "server.drain_timeout_seconds": 0,
    }
    point = {"DORAD_FAILPOINT": "store_tmp_written:2=hang"}
    with serve(zoo.model("llama2"), None, settings, **point) as server:
        options = {"timeout": 20, "metadata": (("authorization", "Bearer a-token"),)}
        publish = server.wire.adapters.PublishFromPath
        first, second = (
            adapters_pb2.PublishFromPathRequest(
                name="a", path=str(zoo.adapter("llama2", "dora", seed)), durable=True
            )
            for seed in (0, 1)
        )
        # The answer to one is the beginning of the next.
        publish(first, **options)
        call = publish.future(second, **options)
        wait_until(lambda: list((store / "tmp").iterdir()), what="the load")
        call.cancel()
        for _ in range(5):
            time.sleep(0.05)
            with pytest.raises(grpc.RpcError) as refused:
                publish(second, **options)
            assert failure(refused.value).reason == "QUOTA_STREAMS"


def test_a_minutes_tokens_are_used_up_by_prompts_and_answers(zoo, tmp_path) -> None:
    path = tmp_path / "tokens.yaml"
    quota = {"quota": {"tokens_per_minute": 60}}  # One a second: few come back during the test.
    write_tokens(path, {"a": ("t", ["infer"]), "b": ("t", ["infer"]), "c": ("u", ["infer"])},
                 {"t": quota, "u": {}})  # fmt: skip
    with serve(zoo.model("llama2"), settings={"security.tokens_file": path}) as server:

        def client(name: str) -> dorad.Client:
            return dorad.Client(server.grpc, token=f"{name}-token", retry_for=0)

        with client("a") as a, client("b") as b, client("c") as c:
            options = {"ignore_eos": True}
            # 50 + 6 x 100 of 60.
            a.generate(PROMPT, n=6, max_tokens=100, **options)
            with pytest.raises(dorad.Overloaded) as refused:
                b.generate(PROMPT, max_tokens=1)
            assert refused.value.reason == "QUOTA_TOKENS"
            assert 0 < refused.value.retry_after <= 600
            assert reason(b.score, [PROMPT]) == "QUOTA_TOKENS"
            assert c.generate(PROMPT, max_tokens=100, **options)


def test_a_score_that_the_full_queue_refuses_costs_no_tokens(zoo, tmp_path) -> None:
    path = tmp_path / "tokens.yaml"
    quota = {"quota": {"tokens_per_minute": 600}}
    tokens = {"a": ("t", ["infer"]), "b": ("u", ["infer"]), "boss": ("ops", ["admin"])}
    write_tokens(path, tokens, {"t": quota, "u": {}, "ops": {}})
    settings = {"security.tokens_file": path, "limits.max_queued_requests": 1}
    with serve(zoo.model("llama2"), settings=settings) as server, connections(server) as connect:
        a, b, boss = connect("a"), connect("b"), connect("boss")
        boss.pause("keep")
        with b.stream(PROMPT, max_tokens=1):
            wait_until(lambda: boss.info().engine.queued_requests == 1, what="a full queue")
            for _ in range(3):
                assert reason(a.score, [PROMPT] * 10) == "QUEUE_FULL"
        boss.resume()
        assert reason(a.score, [PROMPT] * 10) == ""


def test_adapters_beyond_the_quota_are_refused(connect, server, zoo) -> None:
    small, folder = connect("small"), zoo.adapter("slow", "lora")
    versions = [small.publish("small.x", path=folder) for _ in range(2)]
    with pytest.raises(dorad.Overloaded) as refused:
        small.publish("small.x", path=folder)
    assert refused.value.reason == "QUOTA_ADAPTERS"
    with small.stream(PROMPT, adapter=versions[0].ref, max_tokens=LONG, ignore_eos=True) as user:
        next(iter(user))
        small.retire(versions[0].ref)
        assert small.adapter(versions[0].ref).state == "retiring"
        assert reason(small.publish, "small.x", path=folder) == "QUOTA_ADAPTERS"
    wait_until(
        lambda: small.adapter(versions[0].ref).state == "gone", what="the memory of the version"
    )
    # A publish that failed leaves its room.
    for _ in range(3):
        with pytest.raises(dorad.InvalidArgument):
            small.publish("small.x", tensors={"x": np.zeros((2, 2))}, config={"r": 1})
    versions.append(small.publish("small.x", path=folder))
    for version in versions[1:]:
        small.retire(version.ref)


def test_publishes_from_paths_at_the_same_time_stay_within_the_quota_of_bytes(
    zoo, tmp_path
) -> None:
    """The first load never ends here: its bytes are neither live nor announced by the client."""
    folder, path, store = (
        zoo.adapter("llama2", "dora"),
        tmp_path / "tokens.yaml",
        tmp_path / "store",
    )
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "adapter_config.json").write_text("{}")
    size = (folder / "adapter_model.safetensors").stat().st_size
    tenants = {"t": {"adapters": "t.", "quota": {"bytes": int(1.5 * size)}}}
    write_tokens(path, {"a": ("t", ["publish"])}, tenants)
    settings = {
        "security.tokens_file": path,
        "adapters.store_path": store,
        "adapters.allowed_roots": f"[{zoo.directory}, {tmp_path}]",
        "adapters.loader_threads": 2,
        "server.drain_timeout_seconds": 0,
    }
    point = {"DORAD_FAILPOINT": "store_tmp_written:1=hang"}
    with serve(zoo.model("llama2"), None, settings, **point) as server:
        options = {"timeout": 60, "metadata": (("authorization", "Bearer a-token"),)}

        def request(folder: Path, durable: bool = False) -> adapters_pb2.PublishFromPathRequest:
            return adapters_pb2.PublishFromPathRequest(
                name="t.a", path=str(folder), durable=durable
            )

        publish = server.wire.adapters.PublishFromPath
        # What a load that fails had reserved is free again.
        for _ in range(3):
            with pytest.raises(grpc.RpcError) as refused:
                publish(request(broken), **options)
            assert failure(refused.value).code == grpc.StatusCode.INVALID_ARGUMENT
        hanging = publish.future(request(folder, durable=True), **options)
        wait_until(lambda: list((store / "tmp").iterdir()), what="the load")
        with pytest.raises(grpc.RpcError) as refused:
            publish(request(folder), **options)
        assert failure(refused.value).reason == "QUOTA_BYTES"
        hanging.cancel()


def test_a_publish_that_is_cancelled_at_its_commit_finds_its_room_taken(zoo, tmp_path) -> None:
    """The room it held is free again, and by now somebody else's."""
    path = tmp_path / "tokens.yaml"
    write_tokens(
        path, {"a": ("t", ["publish"])}, {"t": {"adapters": "t.", "quota": {"adapters": 1}}}
    )
    settings = {
        "security.tokens_file": path,
        "adapters.allowed_roots": f"[{zoo.directory}]",
    }
    folder = zoo.adapter("llama2", "dora")
    image = (folder / "adapter_model.safetensors").read_bytes()
    begin = adapters_pb2.PublishBegin(
        name="t.a",
        upload_id="u",
        adapter_config_json=(folder / "adapter_config.json").read_text(),
        safetensors_size=len(image),
    )
    parts = list(publish_parts(begin, image))
    # The commit has come, and would be looked at when the client has gone.
    point = {"DORAD_FAILPOINT": f"rpc_read_done:{len(parts)}=delay"}
    with serve(zoo.model("llama2"), None, settings, **point) as server:
        options = {"timeout": 20, "metadata": (("authorization", "Bearer a-token"),)}
        adapters = server.wire.adapters
        asked = adapters_pb2.GetUploadRequest(upload_id="u")
        gone, sent = threading.Event(), threading.Event()

        def commit_last():
            yield from parts[:-1]
            sent.wait(20)
            yield parts[-1]
            gone.wait(20)

        call = adapters.Publish.future(commit_last(), **options)

        def upload() -> adapters_pb2.GetUploadResponse:
            try:
                return adapters.GetUpload(asked, **options)
            except grpc.RpcError:
                return adapters_pb2.GetUploadResponse()

        wait_until(lambda: upload().received_bytes == len(image), what="the bytes")
        sent.set()
        wait_until(lambda: "delayed at a failpoint" in server.log(), what="the commit was read")
        call.cancel()
        gone.set()
        wait_until(
            lambda: 'dorad_rpc_handled_total{code="CANCELLED"' in server.metrics_text(),
            what="the end of the call",
        )
        other = adapters_pb2.PublishFromPathRequest(name="t.b", path=str(folder))
        adapters.PublishFromPath(other, **options)
        # The delayed read has ended, and nothing came of it.
        time.sleep(6)
        assert not upload().committed
        with pytest.raises(grpc.RpcError) as refused:
            adapters.Publish(iter(parts), **options)
        assert failure(refused.value).reason == "QUOTA_ADAPTERS"
        assert len(adapters.List(adapters_pb2.ListRequest(), **options).adapters) == 1


def test_a_newer_stream_takes_an_upload_over_within_the_same_quota(connect, server, zoo) -> None:
    """The hanging stream's room goes to the one that takes its upload over."""
    folder = zoo.adapter("slow", "dora")
    config = (folder / "adapter_config.json").read_text()
    weights = (folder / "adapter_model.safetensors").read_bytes()
    small = connect("small")
    kept = small.publish("small.kept", path=folder)  # one of the two that the quota has room for
    begin = adapters_pb2.PublishBegin(
        name="small.x",
        adapter_config_json=config,
        safetensors_size=len(weights),
        upload_id="taken-over",
    )
    parts = list(publish_parts(begin, weights))
    forever = threading.Event()

    def hangs():
        yield parts[0]
        forever.wait(60)

    metadata = [("authorization", "Bearer small-token")]
    wire = Wire(server.grpc)
    hanging = wire.adapters.Publish.future(hangs(), metadata=metadata, timeout=60)
    asked = adapters_pb2.GetUploadRequest(upload_id="taken-over")
    wait_until(
        lambda: reason(small._call, small._adapters.GetUpload, asked) == "", what="the upload"
    )
    published = wire.adapters.Publish(iter(parts), metadata=metadata, timeout=60)
    assert published.adapter.name == "small.x"
    with pytest.raises(grpc.RpcError) as over:
        hanging.result()
    assert failure(over.value).reason == "UPLOAD_TAKEN_OVER"
    forever.set()
    for ref in (f"small.x@{published.adapter.version}", kept.ref):
        small.retire(ref)
    wire.close()


def test_a_tenant_has_a_share_of_the_pauses(connect) -> None:
    small, other = connect("a-trainer"), connect("b-trainer")
    for number in range(64):
        small.pause(adapter=f"team-a.p{number}", allow_missing=True)
    one_more = {"adapter": "team-a.one-too-many", "allow_missing": True}
    assert reason(small.pause, **one_more) == "PAUSES_FULL"
    small.pause(adapter="team-a.p7", allow_missing=True)  # which is there
    other.pause(adapter="team-b.x")
    connect("boss").resume()
    small.pause(**one_more)
    connect("boss").resume()
