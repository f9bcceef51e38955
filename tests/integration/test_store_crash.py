"""kill -9 at every step of the store: what was acknowledged is there, the rest wholly or not."""

import random
import signal
import threading
from pathlib import Path

import grpc
import pytest
from dorad.v1 import types_pb2
from lib.stores import (
    FAMILY,
    answer,
    fails_to_start,
    leftovers,
    objects,
    refused,
    serve_store,
)

KILLED = -signal.SIGKILL
ABSENT, PRESENT, EITHER = {False}, {True}, {False, True}
# Where a publish can die, and whether the version may be there afterwards. A journal's record
# reaches the disk in the background, synced or not. Appends are: start, number, version.
PUBLISH_POINTS = [
    ("journal_mid_append:2", ABSENT),
    ("journal_before_sync:2", ABSENT),
    ("journal_after_sync:2", ABSENT),
    ("store_tmp_written", ABSENT),
    ("store_before_rename", ABSENT),
    ("store_after_rename", ABSENT),
    ("journal_mid_append:3", ABSENT),
    ("journal_before_sync:3", EITHER),
    ("journal_after_sync:3", PRESENT),
]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture(scope="module")
def known(zoo, tmp_path_factory) -> dict[int, tuple[str, list[int]]]:
    """Digest and greedy tokens of the adapters by seed, from a server that nobody kills."""
    with serve_store(zoo, tmp_path_factory.mktemp("known") / "store") as server:
        result = {}
        for seed in range(3):
            done = server.wire.publish("x", zoo.adapter(FAMILY, "dora", seed)).adapter
            result[seed] = done.digest, answer(server, f"x@{done.version}")
        return result


def check(server, version: int, expected: tuple[str, list[int]]) -> None:
    digest, tokens = expected
    record = server.wire.adapter(f"x@{version}")
    assert record.state == types_pb2.ADAPTER_STATE_READY and record.digest == digest
    assert answer(server, f"x@{version}") == tokens


def one_version(zoo, store: Path) -> None:
    with serve_store(zoo, store) as server:
        folder = zoo.adapter(FAMILY, "dora", 0)
        server.wire.publish("x", folder, durable=True, activate=True)


@pytest.mark.parametrize(("point", "there"), PUBLISH_POINTS, ids=[p for p, _ in PUBLISH_POINTS])
def test_a_publish_that_dies_is_wholly_there_or_not(zoo, store, known, point, there) -> None:
    one_version(zoo, store)
    with serve_store(zoo, store, expect_exit=KILLED, DORAD_FAILPOINT=point) as server:
        folder = zoo.adapter(FAMILY, "dora", 1)
        with pytest.raises(grpc.RpcError) as caught:
            server.wire.publish("x", folder, durable=True, activate=True)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        server.process.wait(60)
    with serve_store(zoo, store) as server:
        check(server, 1, known[0])
        versions = [v.version for v in server.wire.list_adapters("x")]
        assert versions in ([1], [1, 2]) and (versions == [1, 2]) in there
        assert server.wire.adapter("x").version == versions[-1]
        if versions == [1, 2]:
            check(server, 2, known[1])
        assert len(objects(store)) == len(versions) and not leftovers(store)
        third = server.wire.publish("x", zoo.adapter(FAMILY, "dora", 2), durable=True).adapter
        assert third.version > versions[-1]
        check(server, third.version, known[2])


@pytest.mark.parametrize("point", ["mid_append", "before_sync", "after_sync"])
@pytest.mark.parametrize("change", ["activate", "retire"])
def test_a_change_that_dies_has_happened_or_not(zoo, store, known, change, point) -> None:
    one_version(zoo, store)
    with serve_store(zoo, store) as server:
        server.wire.publish("x", zoo.adapter(FAMILY, "dora", 1), durable=True)
    failpoint = f"journal_{point}:2"
    with serve_store(zoo, store, expect_exit=KILLED, DORAD_FAILPOINT=failpoint) as server:
        with pytest.raises(grpc.RpcError):
            if change == "activate":
                server.wire.activate("x", 2)
            else:
                server.wire.retire("x", 1)
        server.process.wait(60)
    with serve_store(zoo, store) as server:
        check(server, 2, known[1])
        happened = {"mid_append": ABSENT, "before_sync": EITHER, "after_sync": PRESENT}[point]
        versions = [v.version for v in server.wire.list_adapters("x")]
        if change == "activate":
            assert versions == [1, 2]
            assert (server.wire.adapter("x").version == 2) in happened
        else:
            assert (versions == [2]) in happened and (versions == [1, 2]) != (versions == [2])
            if versions == [2]:
                refusal = refused(server.wire.adapter, "x")
                assert refusal.reason == "ADAPTER_NO_ACTIVE_VERSION"
        if 1 in versions:
            check(server, 1, known[0])
        assert len(objects(store)) == len(versions)


def test_a_removal_that_dies_is_finished_by_the_next_start(zoo, store, known) -> None:
    one_version(zoo, store)
    with serve_store(zoo, store) as server:
        server.wire.publish("x", zoo.adapter(FAMILY, "dora", 1), durable=True)
    point = "store_before_removal"
    with serve_store(zoo, store, expect_exit=KILLED, DORAD_FAILPOINT=point) as server:
        try:
            server.wire.retire("x", 1)
        except grpc.RpcError as error:  # it may die before the answer is out
            assert error.code() == grpc.StatusCode.UNAVAILABLE
        server.process.wait(60)
    assert len(objects(store)) == 2
    with serve_store(zoo, store) as server:
        assert [v.version for v in server.wire.list_adapters("x")] == [2]
        check(server, 2, known[1])
    assert len(objects(store)) == 1 and not leftovers(store)


@pytest.mark.parametrize(
    "point",
    ["compaction_mid_write", "compaction_before_rename", "compaction_after_rename",
     "journal_mid_append", "journal_before_sync", "journal_after_sync"],
)  # fmt: skip
def test_a_start_that_dies_changes_nothing(zoo, store, known, point) -> None:
    one_version(zoo, store)
    if point.startswith("compaction"):
        with serve_store(zoo, store) as server:
            tags = {f"tag{i}": "x" * 1000 for i in range(20)}
            folder = zoo.adapter(FAMILY, "dora", 1)
            server.wire.publish("x", folder, durable=True, tags=tags)
            server.wire.retire("x", 2)
    size = (store / "journal").stat().st_size
    code, error = fails_to_start(zoo, store, DORAD_FAILPOINT=point)
    assert code == KILLED, error
    with serve_store(zoo, store) as server:
        check(server, 1, known[0])
        assert server.wire.adapter("x").version == 1
        assert len(server.wire.list_adapters()) == 1
        expected = 3 if point.startswith("compaction") else 2
        done = server.wire.publish("x", zoo.adapter(FAMILY, "dora", 2), durable=True)
        assert done.adapter.version == expected
    if point.startswith("compaction"):
        assert (store / "journal").stat().st_size < size / 2


@pytest.mark.parametrize("point", ["mid_write", "before_rename", "after_rename"])
def test_a_running_server_that_dies_rewriting_its_journal_loses_nothing(
    zoo, store, known, point
) -> None:
    one_version(zoo, store)
    tags = {f"tag{i}": "x" * 1000 for i in range(20)}
    failpoint = f"compaction_{point}"
    with serve_store(zoo, store, expect_exit=KILLED, DORAD_FAILPOINT=failpoint) as server:
        retired = 1
        with pytest.raises(grpc.RpcError) as caught:
            for version in range(2, 20):
                folder = zoo.adapter(FAMILY, "dora", version % 2)
                server.wire.publish("x", folder, durable=True, activate=True, tags=tags)
                if version > 2:
                    retired = version - 1
                    server.wire.retire("x", retired)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        server.process.wait(60)
    # A journal is rewritten when a change is on the disk, a publish or a retirement.
    assert version > 3
    long = 3 * 20000
    assert ((store / "journal").stat().st_size < long) == (point == "after_rename")
    with serve_store(zoo, store) as server:
        kept = [1, *range(retired + 1, version + 1)]
        assert [v.version for v in server.wire.list_adapters("x")] == kept
        assert server.wire.adapter("x").version == version
        for number in kept:
            seed = 0 if number == 1 else number % 2
            check(server, number, known[seed])
        assert not leftovers(store) and (store / "journal").stat().st_size < long
        third = server.wire.publish("x", zoo.adapter(FAMILY, "dora", 2), durable=True).adapter
        assert third.version == version + 1
    with serve_store(zoo, store) as server:
        check(server, third.version, known[2])


@pytest.mark.timeout(240)
def test_everything_acknowledged_survives_kills_at_any_moment(zoo, store, known) -> None:
    """A trainer publishes, activates and retires as fast as it can; the server is killed."""
    chance = random.Random(5)
    # What the trainer knows: versions that must be there, the one that must be active (None: one
    # of two), and what it was doing when the server died.
    there, active, highest = {}, 0, 0
    for _ in range(6):
        with serve_store(zoo, store, expect_exit=KILLED) as server:
            timer = threading.Timer(0.1 + 0.6 * chance.random(), server.process.kill)
            timer.start()
            doing = None
            try:
                while True:
                    if len(there) > 3:
                        doing = "retire", min(there.keys() - {active})
                        server.wire.retire("x", doing[1])
                        del there[doing[1]]
                    doing = "publish", highest + 1
                    seed = chance.randrange(3)
                    folder = zoo.adapter(FAMILY, "dora", seed)
                    done = server.wire.publish("x", folder, durable=True).adapter
                    assert done.version > highest
                    highest, there[done.version] = done.version, seed
                    doing = "activate", done.version
                    server.wire.activate("x", done.version)
                    active = done.version
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.UNAVAILABLE, error
            timer.join()
            server.process.wait(60)
        with serve_store(zoo, store) as server:
            found = {v.version: v for v in server.wire.list_adapters("x")}
            for version, seed in list(there.items()):
                if version not in found and doing == ("retire", version):
                    del there[version]
                    continue
                assert found[version].digest == known[seed][0]
                check(server, version, known[seed])
            extra = found.keys() - there.keys()
            assert not extra or (doing[0] == "publish" and len(extra) == 1)
            for version in extra:  # unacknowledged, but whole
                (seed,) = (s for s in known if known[s][0] == found[version].digest)
                check(server, version, known[seed])
                there[version] = seed
            highest = max([highest, *found])
            now = [v.version for v in found.values() if v.active]
            before = [active] if active else []
            assert now == before or (doing[0] == "activate" and now == [doing[1]])
            active = now[0] if now else 0
            assert not leftovers(store)
    assert highest > 6, "the server was killed before it did anything"
