"""Durable adapters come back after a restart; ephemeral ones do not, and their numbers neither."""

import itertools
import os
import shutil
import subprocess
from pathlib import Path

import dorad
import grpc
import pytest
from dorad.v1 import adapters_pb2, types_pb2
from lib.server import serve, wait_until
from lib.stores import (
    EXIT_CONFIG,
    FAMILY,
    answer,
    fails_to_start,
    leftovers,
    objects,
    refused,
    serve_store,
)
from lib.wire import DEADLINE

READY = types_pb2.ADAPTER_STATE_READY


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_durable_versions_come_back_as_they_were(zoo, store: Path) -> None:
    with serve_store(zoo, store) as server:
        folder = zoo.adapter(FAMILY, "dora", 0)
        first = server.wire.publish("x", folder, durable=True, tags={"step": "1"}, activate=True)
        server.wire.publish_path("x", zoo.adapter(FAMILY, "lora", 1), durable=True, version=7)
        server.wire.publish("x", zoo.adapter(FAMILY, "dora", 2), durable=True)
        server.wire.retire("x", 8)
        assert first.adapter.durable
        before = {v.version: v for v in server.wire.list_adapters("x")}
        tokens = {ref: answer(server, ref) for ref in ("x", "x@1", "x@7")}
    assert tokens["x"] == tokens["x@1"] != tokens["x@7"]
    with serve_store(zoo, store) as server:
        versions = server.wire.list_adapters("x")
        assert [v.version for v in versions] == [1, 7] and all(v.durable for v in versions)
        for version in versions:
            old = before[version.version]
            assert version.state == READY and version.digest == old.digest
            assert version.tags == old.tags and version.create_time == old.create_time
            assert version.active == old.active
        assert {ref: answer(server, ref) for ref in tokens} == tokens
        assert server.wire.publish("x", folder).adapter.version == 9
    assert len(objects(store)) == 2 and not leftovers(store)


def test_activation_and_retirement_survive(zoo, store: Path) -> None:
    with serve_store(zoo, store) as server:
        for seed in range(3):
            server.wire.publish("x", zoo.adapter(FAMILY, "dora", seed), durable=True)
        server.wire.activate("x", 1)
        server.wire.activate("x", 3)
        server.wire.retire("x", 2)
        wait_until(lambda: len(objects(store)) == 2, what="the retired version's object removed")
    with serve_store(zoo, store) as server:
        assert [(v.version, v.active) for v in server.wire.list_adapters()] == [
            (1, False),
            (3, True),
        ]
        server.wire.retire("x", 3)
    with serve_store(zoo, store) as server:
        assert refused(server.wire.adapter, "x").reason == "ADAPTER_NO_ACTIVE_VERSION"
        assert server.wire.adapter("x@1").state == READY


def test_ephemeral_versions_are_gone_and_their_numbers_stay_taken(zoo, store: Path) -> None:
    folder = zoo.adapter(FAMILY, "lora", 0)
    with serve_store(zoo, store, {"pre": folder}) as server:
        assert not server.wire.adapter("pre").durable
        server.wire.publish("x", folder, durable=True, activate=True)
        assert not server.wire.publish("x", folder, activate=True).adapter.durable
        server.wire.publish("y", folder, version=41)
        bad = refused(server.wire.publish_bytes, "z", "{}", b"no safetensors file")
        assert bad.code == grpc.StatusCode.INVALID_ARGUMENT
    with serve_store(zoo, store, {"pre": folder}) as server:
        assert [(v.name, v.version) for v in server.wire.list_adapters()] == [
            ("pre", 2),
            ("x", 1),
        ], "a preloaded adapter is published anew at each start"
        assert refused(server.wire.adapter, "x").reason == "ADAPTER_NO_ACTIVE_VERSION"
        assert "the active version was not durable" in server.log()
        assert server.wire.publish("x", folder).adapter.version == 3
        assert server.wire.publish("y", folder).adapter.version == 42
        assert server.wire.publish("z", folder).adapter.version == 2


def test_a_preloaded_adapter_takes_no_place_from_a_durable_active_version(zoo, store: Path) -> None:
    start = {"policy": zoo.adapter(FAMILY, "lora", 0)}
    with serve_store(zoo, store, start) as server:
        server.wire.publish("policy", zoo.adapter(FAMILY, "dora", 1), durable=True, activate=True)
        trained = answer(server, "policy")
        assert trained != answer(server, "policy@1")
    for adapters in (start, None):
        with serve_store(zoo, store, adapters) as server:
            versions = [(v.version, v.active) for v in server.wire.list_adapters()]
            assert versions == [(2, True)]
            assert answer(server, "policy") == trained
            assert ("an adapter is not preloaded" in server.log()) == (adapters is not None)
    (damaged,) = store.glob("objects/*/*/adapter_model.safetensors")
    damaged.write_bytes(b"rotten")
    with serve_store(zoo, store, start) as server:
        refusal = refused(server.wire.generate, [1], adapter="policy")
        assert refusal.reason == "ADAPTER_NO_ACTIVE_VERSION", "the start takes no one's place"
        server.wire.retire("policy", 2)
    with serve_store(zoo, store, start) as server:
        assert [(v.version, v.active) for v in server.wire.list_adapters()] == [(3, True)]


def test_generations_go_on_and_watchers_learn_of_the_restart(zoo, store: Path) -> None:
    folder = zoo.adapter(FAMILY, "lora", 0)
    with serve_store(zoo, store) as server:
        server.wire.publish("x", folder, durable=True)
        server.wire.publish("x", folder)
        server.wire.retire("x", 2)
        old = server.wire.info().generation
    with serve_store(zoo, store) as server:
        now = server.wire.info().generation
        assert now > old

        def watch(generation: int):
            request = adapters_pb2.WatchRequest(from_generation=generation)
            return next(server.wire.adapters.Watch(request, timeout=DEADLINE))

        assert refused(watch, old).reason == "GENERATION_COMPACTED"
        assert refused(server.wire.activate, "x", 1, old).reason == "GENERATION_MISMATCH"
        server.wire.activate("x", 1, now)
        event = watch(now)
        assert event.type == adapters_pb2.WATCH_EVENT_TYPE_ACTIVATED
        assert event.generation == now + 1


def test_equal_content_is_stored_once(zoo, store: Path) -> None:
    folder = zoo.adapter(FAMILY, "dora", 0)
    with serve_store(zoo, store) as server:
        for name in ("a", "b", "a"):
            server.wire.publish(name, folder, durable=True)
        assert len(objects(store)) == 1
        server.wire.retire("a", 1)
        server.wire.retire("b", 1)
    with serve_store(zoo, store) as server:
        assert answer(server, "a@2") and len(objects(store)) == 1
        server.wire.retire("a", 2)
        wait_until(lambda: not objects(store), what="the last object removed")
    assert not leftovers(store)


def test_durable_needs_a_store(zoo) -> None:
    with serve(zoo.model(FAMILY), None, {"adapters.allowed_roots": f"[{zoo.directory}]"}) as server:
        folder = zoo.adapter(FAMILY, "lora", 0)
        for publish in (server.wire.publish, server.wire.publish_path):
            refusal = refused(publish, "x", folder, durable=True)
            assert refusal.code == grpc.StatusCode.FAILED_PRECONDITION
            assert refusal.reason == "STORE_NOT_CONFIGURED"
        assert server.wire.list_adapters() == []


def test_a_failed_load_leaves_nothing_in_the_store(zoo, store: Path) -> None:
    folder = zoo.adapter(FAMILY, "lora", 0)
    with serve_store(zoo, store) as server:
        config = (folder / "adapter_config.json").read_text()
        image = (folder / "adapter_model.safetensors").read_bytes()
        refused(server.wire.publish_bytes, "x", config, image[:-1], durable=True)
        stale = dict(durable=True, activate=True, expected_generation=999)
        assert refused(server.wire.publish, "x", folder, **stale).reason == "GENERATION_MISMATCH"
        assert not objects(store) and not leftovers(store)


def test_an_upload_that_the_disk_refused_is_published_by_the_next_try(zoo, store: Path) -> None:
    folder = zoo.adapter(FAMILY, "lora", 0)
    image = (folder / "adapter_model.safetensors").read_bytes()
    begin = adapters_pb2.PublishBegin(
        name="x",
        adapter_config_json=(folder / "adapter_config.json").read_text(),
        safetensors_size=len(image),
        durable=True,
        upload_id="x",
    )
    with serve_store(zoo, store) as server:
        (store / "objects").rename(store / "away")
        refusal = refused(server.wire.publish_rest, begin, image, 0)
        assert refusal.reason == "STORE_UNAVAILABLE"
        (store / "away").rename(store / "objects")
        done = server.wire.publish_rest(begin, image, 0).adapter
        assert (done.version, done.durable) == (2, True)
        begin.upload_id, begin.version = "with-a-number", 7
        (store / "objects").rename(store / "away")
        assert refused(server.wire.publish_rest, begin, image, 0).reason == "STORE_UNAVAILABLE"
        (store / "away").rename(store / "objects")
        # Numbers are used once; who chose this one learns what became of it.
        refusal = refused(server.wire.publish_rest, begin, image, 0)
        assert refusal.reason == "ADAPTER_VERSION_TAKEN"
        assert refusal.metadata["failure_reason"] == "STORE_UNAVAILABLE"


def test_one_server_at_a_time(zoo, store: Path) -> None:
    with serve_store(zoo, store) as server:
        server.wire.publish("x", zoo.adapter(FAMILY, "lora", 0), durable=True)
        code, error = fails_to_start(zoo, store)
        assert code == EXIT_CONFIG and "another process uses the store" in error
        assert answer(server, "x@1")


def test_a_store_belongs_to_one_base_model(zoo, store: Path) -> None:
    with serve_store(zoo, store):
        pass
    code, error = fails_to_start(zoo, store, family="llama3")
    assert code == EXIT_CONFIG and "give each base model a store of its own" in error


def test_a_damaged_object_fails_its_version_alone(zoo, store: Path) -> None:
    good, bad = zoo.adapter(FAMILY, "dora", 0), zoo.adapter(FAMILY, "dora", 1)
    with serve_store(zoo, store) as server:
        server.wire.publish("x", good, durable=True)
        kept = set(objects(store))
        stored = server.wire.publish("x", bad, durable=True, activate=True).adapter
        tokens = answer(server, "x@1"), answer(server, "x@2")
    (damaged,) = (p for p in store.glob("objects/*/*") if p.name not in kept)
    file = damaged / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with serve_store(zoo, store) as server:
        version = server.wire.adapter("x@2")
        assert version.state == types_pb2.ADAPTER_STATE_FAILED and version.durable
        assert version.digest == stored.digest, "the journal has it, although the files are damaged"
        assert str(damaged.relative_to(store)) in version.failure and not version.active
        assert str(store) not in version.failure
        assert server.metric("dorad_store_failures_total", reason="STORE_OBJECT_DAMAGED") == 1
        assert refused(server.wire.generate, [1], adapter="x").reason == "ADAPTER_NO_ACTIVE_VERSION"
        assert answer(server, "x@1") == tokens[0]
        # The same content again mends what is stored of it.
        assert server.wire.publish("x", bad, durable=True).adapter.version == 3
    with serve_store(zoo, store) as server:
        assert answer(server, "x@2") == answer(server, "x@3") == tokens[1]
        assert server.wire.adapter("x").version == 2
    shutil.rmtree(damaged)
    with serve_store(zoo, store) as server:
        for version in (2, 3):
            failed = server.wire.adapter(f"x@{version}")
            assert failed.state == types_pb2.ADAPTER_STATE_FAILED
            assert damaged.name in failed.failure and str(store) not in failed.failure
            server.wire.retire("x", version)
    with serve_store(zoo, store) as server:
        assert [v.version for v in server.wire.list_adapters()] == [1]


def test_a_damaged_journal_stops_the_start_and_loses_nothing(zoo, store: Path) -> None:
    with serve_store(zoo, store) as server:
        for seed in range(2):
            server.wire.publish("x", zoo.adapter(FAMILY, "lora", seed), durable=True)
    journal = store / "journal"
    whole = journal.read_bytes()
    offset = whole.index(b"\n") + 1
    damaged = bytearray(whole)
    damaged[offset + 40] ^= 1
    journal.write_bytes(damaged)
    code, error = fails_to_start(zoo, store)
    assert code == EXIT_CONFIG and f"{journal} is damaged at byte {offset} of {len(whole)}" in error
    assert journal.read_bytes() == damaged and len(objects(store)) == 2
    journal.write_bytes(whole)
    with serve_store(zoo, store) as server:
        assert [v.version for v in server.wire.list_adapters()] == [1, 2]


def test_metrics_tell_what_the_store_holds_and_does(zoo, store: Path) -> None:
    def holds(server, count: int) -> bool:
        files = [f for name in objects(store) for f in store.glob(f"objects/*/{name}/*")]
        try:
            file_bytes = sum(file.stat().st_size for file in files)
        except FileNotFoundError:  # removed since it was listed
            return False
        return (
            server.metric("dorad_store_objects") == len(objects(store)) == count
            and server.metric("dorad_store_object_bytes") == file_bytes
            and server.metric("dorad_store_journal_bytes") == (store / "journal").stat().st_size
        )

    with serve_store(zoo, store) as server:
        assert holds(server, 0)
        for seed in (0, 0, 1):
            server.wire.publish("x", zoo.adapter(FAMILY, "dora", seed), durable=True)
        assert holds(server, 2)
        assert server.metric("dorad_store_appends_total") == 6  # numbers and versions
        seconds = server.metric("dorad_store_append_seconds_total")
        server.wire.activate("x", 3)
        assert server.metric("dorad_store_appends_total") == 7
        assert server.metric("dorad_store_append_seconds_total") > seconds > 0
        server.wire.retire("x", 3)
        wait_until(lambda: holds(server, 1), what="the object's removal")
        assert server.metric("dorad_store_compactions_total") == 0
    with serve_store(zoo, store) as server:
        assert holds(server, 1)
        tags = {f"tag{i}": "x" * 1000 for i in range(20)}
        for version in range(4, 9):
            folder = zoo.adapter(FAMILY, "lora", 1)
            server.wire.publish("y", folder, durable=True, tags=tags, version=version)
            server.wire.retire("y", version)
        assert server.metric("dorad_store_compactions_total") >= 1
        wait_until(lambda: holds(server, 1), what="the object's removal")


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 1 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    yield path
    subprocess.run(["umount", path], check=True)


def test_a_full_disk_refuses_durable_versions_and_serving_goes_on(zoo, small_disk: Path) -> None:
    store = small_disk / "store"
    with serve_store(zoo, store) as server:
        accepted, refusal = [], None
        for seed in itertools.count():
            folder = zoo.adapter(FAMILY, "dora", seed)
            try:
                accepted.append(server.wire.publish("x", folder, durable=True).adapter.version)
            except grpc.RpcError:
                refusal = refused(server.wire.publish, "x", folder, durable=True)
                break
            assert seed < 100, "the disk never fills up"
        assert refusal.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refusal.reason == "STORE_FULL" and refusal.retry_after is None
        assert server.metric('dorad_store_failures_total{reason="STORE_FULL"}') >= 2
        assert len(objects(store)) == len(accepted) >= 1 and not leftovers(store)
        tokens = {version: answer(server, f"x@{version}") for version in accepted}
        assert answer(server, "") and server.wire.activate("x", accepted[-1])
        ephemeral = server.wire.publish("x", folder).adapter
        assert answer(server, f"x@{ephemeral.version}") not in tokens.values()
        server.wire.retire("x", accepted[0])
        wait_until(lambda: len(objects(store)) < len(accepted), what="room on the disk")
        made_room = server.wire.publish("x", folder, durable=True).adapter.version
        tokens[made_room] = answer(server, f"x@{made_room}")
        del tokens[accepted[0]]
    with serve_store(zoo, store) as server:
        assert {v.version for v in server.wire.list_adapters()} == set(tokens)
        assert all(answer(server, f"x@{version}") == tokens[version] for version in tokens)
        assert server.wire.adapter("x").version == accepted[-1] or len(accepted) == 1


def test_without_a_store_an_old_reference_names_no_new_version(zoo) -> None:
    """Numbers begin again at 1, so only the digest tells the versions apart."""
    settings = {"adapters.allowed_roots": f"[{zoo.directory}]"}
    with serve(zoo.model(FAMILY), None, settings) as server, dorad.Client(server.grpc) as client:
        old = client.publish("x", path=zoo.adapter(FAMILY, "dora", 0))
        assert client.generate([1, 2], adapter=old.ref, max_tokens=1)[0].spans[0].ref == old.ref
    with serve(zoo.model(FAMILY), None, settings) as server, dorad.Client(server.grpc) as client:
        new = client.publish("x", path=zoo.adapter(FAMILY, "dora", 1))
        assert new.label == old.label and new.ref != old.ref
        for call in (client.retire, client.activate, client.adapter):
            with pytest.raises(dorad.NotFound, match=f"its digest is {new.digest[:12]}, not"):
                call(old.ref)
        with pytest.raises(dorad.NotFound):
            client.generate([1, 2], adapter=old.ref, max_tokens=1)
        with pytest.raises(dorad.NotFound):
            client.pause(adapter=old.ref)
        assert client.adapter("x").digest == new.digest
        client.retire(new.ref)
