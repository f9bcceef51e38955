"""A fleet of real servers: one truth about versions, and bytes that servers pass to each other."""

import contextlib
import itertools
import os
import signal
import threading
import traceback

import dorad
import grpc
import pytest
from dorad._pool_server import Server as PoolServer
from dorad._publish import FileImage
from dorad.fleet.coordinator import Coordinator
from dorad.fleet.manifest_store import ManifestFile
from dorad.v1 import adapters_pb2
from lib.peers import ALLOWED
from lib.server import command, free_port, start, wait_until

PROMPTS = [[3, 5, 7, 11 + i] for i in range(6)]
SMALL = {
    "engine.kv_bytes": 16 << 20,
    "engine.threads": 1,
    "server.drain_timeout_seconds": 1,
} | ALLOWED


@pytest.fixture
def folder(zoo):
    return zoo.adapter("slow", "dora_r64")


@pytest.fixture
def other(zoo):
    return zoo.adapter("slow", "dora_r64", 1)


class Servers:
    """Servers with a store each, that can be killed and started again at the same address."""

    def __init__(self, zoo, tmp_path, stack, count):
        self._zoo, self._tmp_path, self._stack = zoo, tmp_path, stack
        self._ports = [free_port() for _ in range(count)]
        self._running = {}
        for n in range(count):
            self.start(n)

    def settings(self, n):
        return SMALL | {
            "server.grpc_listen": f"127.0.0.1:{self._ports[n]}",
            "adapters.store_path": self._tmp_path / f"store-{n}",
        }

    @property
    def targets(self):
        return [f"127.0.0.1:{port}" for port in self._ports]

    def start(self, n):
        log = self._tmp_path / f"server-{n}.log"
        server = start(command(self._zoo.model("slow"), settings=self.settings(n)), log)
        self._running[n] = server
        self._stack.callback(self._end, server)

    @staticmethod
    def _end(server):
        server.wire.close()
        if server.process.poll() is None:
            assert server.stop() == 0

    def kill(self, n):
        os.kill(self._running[n].pid, signal.SIGKILL)
        self._running[n].process.wait(60)

    def active(self, n, name):
        with dorad.Client(self.targets[n]) as client:
            found = [v for v in client.adapters(name) if v.active]
            return (found[0].version, found[0].digest) if found else None


@pytest.fixture
def make(zoo, tmp_path):
    with contextlib.ExitStack() as stack:
        yield lambda count: Servers(zoo, tmp_path, stack, count)


@pytest.fixture
def sent(monkeypatch):
    """Bytes that uploads from this process have sent."""
    counts = []
    pieces = FileImage.pieces

    def counted(self, offset=0):
        counted_now = not is_hashing()
        for piece in pieces(self, offset):
            if counted_now:
                counts.append(len(piece))
            yield piece

    monkeypatch.setattr(FileImage, "pieces", counted)
    return lambda: sum(counts)


def is_hashing():
    """Whether the caller's caller reads the file for its digest."""
    return any(frame.name == "hashes" for frame in traceback.extract_stack())


def members_state(fleet):
    return {report.target: report.state for report in fleet.report()}


def all_ready(fleet, count):
    wait_until(
        lambda: list(members_state(fleet).values()) == ["ready"] * count, what="every member"
    )


def labels(results):
    return {span.label for samples in results for sample in samples for span in sample.spans}


def test_the_trainer_sends_an_adapter_twice_whatever_the_number_of_members(
    make, tmp_path, folder, sent
):
    servers = make(5)
    with dorad.Fleet(tmp_path / "manifest", servers.targets) as fleet:
        all_ready(fleet, 5)
        version = fleet.publish("a", path=folder)
        assert version.label == "a@1" and version.active and version.durable
        assert sent() == 2 * (folder / "adapter_model.safetensors").stat().st_size
        assert {servers.active(n, "a") for n in range(5)} == {(1, version.digest)}
        results = fleet.generate_many(PROMPTS, adapter="a", max_tokens=2)
        assert labels(results) == {"a@1"}


def test_a_publish_succeeds_with_one_of_six_dead_and_it_returns_with_the_right_version(
    make, tmp_path, folder, other
):
    servers = make(6)
    with dorad.Fleet(tmp_path / "manifest", servers.targets) as fleet:
        all_ready(fleet, 6)
        fleet.publish("a", path=folder)
        servers.kill(1)  # One of the two that the trainer sends to.
        second = fleet.publish("a", path=other)
        assert second.version == 2
        assert [servers.active(n, "a") for n in (0, 2, 3, 4, 5)] == [(2, second.digest)] * 5
        assert members_state(fleet)[servers.targets[1]] == "unavailable"
        asked = WatchPrompts(servers.targets[1])
        with asked:
            servers.start(1)
            for round in itertools.count():  # Until one of the prompts is at home there.
                prompts = [[5 + n, 5 + round % 40] for n in range(40)]
                results = fleet.generate_many(prompts, adapter="a", max_tokens=1)
                assert labels(results) == {"a@2"}
                if asked.refs:
                    break
        assert servers.active(1, "a") == (2, second.digest)
        # From its first prompt on it had the fleet's version active.
        assert set(asked.refs) == {f"a@2:{second.digest}"}
        assert set(asked.actives) == {(2, second.digest)}


class WatchPrompts:
    """Notes the references that prompts for one server name, and what it has active then."""

    def __init__(self, target):
        self.target = target
        self.refs, self.actives = [], []

    def __enter__(self):
        self._real = real = PoolServer.generate
        watcher = self

        async def generate(server, request, timeout):
            if server.target == watcher.target:
                found = await server.client.adapters("a")
                watcher.actives += [(v.version, v.digest) for v in found if v.active]
                watcher.refs.append(request.adapter)
            return await real(server, request, timeout)

        PoolServer.generate = generate
        return self

    def __exit__(self, *exc):
        PoolServer.generate = self._real


def test_a_relay_that_dies_in_the_middle_costs_the_others_nothing(
    make, tmp_path, folder, monkeypatch, sent
):
    servers = make(4)
    slow = threading.Event()
    pieces = FileImage.pieces

    def held(self, offset=0):
        for number, piece in enumerate(pieces(self, offset)):
            if number == 2 and not is_hashing():
                assert slow.wait(60)
            yield piece

    monkeypatch.setattr(FileImage, "pieces", held)
    with dorad.Fleet(tmp_path / "manifest", servers.targets) as fleet:
        all_ready(fleet, 4)
        result = []
        publishing = threading.Thread(target=lambda: result.append(fleet.publish("a", path=folder)))
        publishing.start()
        upload = wait_until(lambda: prepared(tmp_path, "a"), what="the preparation").upload_id

        def halfway(n):
            request = adapters_pb2.GetUploadRequest(upload_id=upload)
            with dorad.Client(servers.targets[n], retry_for=0) as client:
                try:
                    answer = client._adapters.GetUpload(request, timeout=10)
                except grpc.RpcError:
                    return False
                return answer.received_bytes == 2 << 20

        wait_until(lambda: halfway(2) and halfway(3), what="the receivers of the relay")
        servers.kill(0)
        slow.set()
        publishing.join(120)
        assert result and result[0].version == 1
        digest = result[0].digest
        assert [servers.active(n, "a") for n in (1, 2, 3)] == [(1, digest)] * 3
        size = (folder / "adapter_model.safetensors").stat().st_size
        # A receiver of the dead one goes on from the bytes that it has.
        assert sent() <= 2 * size + (2 << 20)


def manifest_of(tmp_path):
    return ManifestFile(tmp_path / "manifest")._read()


def prepared(tmp_path, name):
    adapter = manifest_of(tmp_path).adapters.get(name)
    return adapter.prepared.release if adapter and adapter.prepared else None


def test_a_second_process_follows_joins_and_retires(make, tmp_path, folder, other):
    servers = make(3)
    manifest = tmp_path / "manifest"
    with dorad.Fleet(manifest, servers.targets[:2]) as trainer, dorad.Fleet(manifest) as worker:
        trainer.publish("a", path=folder)
        assert labels(worker.generate_many(PROMPTS, adapter="a", max_tokens=1)) == {"a@1"}
        trainer.publish("a", path=other)
        assert labels(worker.generate_many(PROMPTS, adapter="a", max_tokens=1)) == {"a@2"}
        worker.join(servers.targets[2])
        all_ready(worker, 3)
        assert servers.active(2, "a") == servers.active(0, "a")
        worker.leave(servers.targets[0])
        wait_until(lambda: trainer.targets == servers.targets[1:], what="the other process")
        trainer.retire("a")
        assert servers.active(1, "a") is None
        with pytest.raises(dorad.NotFound):
            worker.generate_many(PROMPTS, adapter="a", max_tokens=1, retry_for=0)
        with pytest.raises(dorad.NotFound):
            trainer.retire("a")


def test_of_two_publishes_at_the_same_time_one_wins(make, tmp_path, folder, other):
    servers = make(2)
    manifest = tmp_path / "manifest"
    with (
        dorad.Fleet(manifest, servers.targets) as one,
        dorad.Fleet(manifest, servers.targets) as two,
    ):
        all_ready(one, 2)
        all_ready(two, 2)
        results = []

        def publish(fleet, path):
            try:
                results.append(fleet.publish("a", path=path))
            except dorad.Conflict as error:
                results.append(error)

        threads = [
            threading.Thread(target=publish, args=args) for args in ((one, folder), (two, other))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        won = [result for result in results if isinstance(result, dorad.AdapterVersion)]
        assert len(results) == 2 and len(won) >= 1
        numbers = [version.version for version in won]
        assert len(set(numbers)) == len(numbers)
        last = max(won, key=lambda version: version.version)
        for n in range(2):
            assert servers.active(n, "a") == (last.version, last.digest)


def test_what_a_dead_coordinator_left_is_undone(make, tmp_path, folder, monkeypatch):
    servers = make(2)
    manifest = tmp_path / "manifest"
    with dorad.Fleet(manifest, servers.targets, lease=2.0) as fleet:
        all_ready(fleet, 2)

        with monkeypatch.context() as patch:
            patch.setattr(Coordinator, "_undo", nothing)
            patch.setattr(Coordinator, "_commit", fails)
            with pytest.raises(RuntimeError, match="the process ends"):
                fleet.publish("a", path=folder)
        assert prepared(tmp_path, "a").version == 1
        # Its members have it all: the next round finishes it.
        wait_until(lambda: servers.active(0, "a") is not None, what="the recovery")
        wait_until(lambda: servers.active(0, "a") == servers.active(1, "a"), what="the recovery")
        assert prepared(tmp_path, "a") is None
        assert fleet.publish("a", path=folder).version == 2


async def nothing(self, *args):
    pass


async def fails(self, *args):
    raise RuntimeError("the process ends")


def test_a_member_gets_back_what_somebody_has_retired_there(make, tmp_path, folder):
    servers = make(2)
    with dorad.Fleet(tmp_path / "manifest", servers.targets) as fleet:
        all_ready(fleet, 2)
        fleet.publish("a", path=folder)
        for n in range(2):  # The first one had it from the trainer, the other one may not.
            with dorad.Client(servers.targets[n]) as client:
                client.retire("a@1")
            wait_until(lambda: servers.active(0, "a") == servers.active(1, "a"), what="the repair")
            assert servers.active(n, "a") is not None


def test_a_refused_adapter_is_refused_by_the_fleet(make, tmp_path, folder):
    servers = make(2)
    with dorad.Fleet(tmp_path / "manifest", servers.targets) as fleet:
        all_ready(fleet, 2)
        with pytest.raises(dorad.InvalidArgument):
            fleet.publish("a", path=folder, config={"peft_type": "LORA", "r": "many"})
        assert manifest_of(tmp_path).adapters["a"].prepared is None
        assert fleet.publish("a", path=folder).version == 2
