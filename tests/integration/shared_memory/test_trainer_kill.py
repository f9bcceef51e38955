"""Nothing is published of a trainer that dies or gives its call up, and nothing of it stays."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import dorad
import grpc
import pytest
from dorad.v1 import types_pb2
from lib.server import ROOT, Server, environment, serve, wait_until
from lib.shared_memory import KIND, adapter


def num_fds(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.pid}/fd"))


@contextlib.contextmanager
def victim(server: Server, socket_path: str, folder: Path, name: str, *options: str):
    """A trainer in a process of its own, with registered memory."""
    program = ROOT / "tests" / "lib" / "trainer.py"
    paths = ":".join(
        [f"{ROOT / 'client' / 'src'}", f"{ROOT / 'tests'}", os.environ.get("PYTHONPATH", "")]
    )
    process = subprocess.Popen(
        [sys.executable, program, server.grpc, socket_path, folder, name, *options],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(PYTHONPATH=paths),
    )
    try:
        assert process.stdout.readline() == "handed over\n"
        yield process
    finally:
        process.kill()
        process.wait()


def version_of(server: Server, ref: str):
    try:
        return server.wire.adapter(ref)
    except grpc.RpcError:
        return None


def test_a_trainer_killed_before_or_after_its_publish_leaves_nothing_behind(
    zoo, tmp_path: Path
) -> None:
    path, folder = tmp_path / "memory.sock", zoo.adapter("slow", KIND)
    with serve(zoo.model("slow"), None, {"server.shared_memory_socket": path}) as server:

        def nothing_held() -> bool:
            names = ("dorad_shared_memory_connections", "dorad_shared_memory_bytes")
            return all(server.metric(name) == 0 for name in names)

        def kill_two(number: int) -> None:
            with victim(server, path, folder, "before", "before") as trainer:
                assert server.metric("dorad_shared_memory_connections") == 1
                assert server.metric("dorad_shared_memory_bytes") > 0
                trainer.kill()
            assert not server.wire.list_adapters("before")
            with victim(server, path, folder, "after") as trainer:
                assert trainer.stdout.readline() == "published\n"
                trainer.kill()
            # What was answered stays.
            ready = types_pb2.ADAPTER_STATE_READY
            assert server.wire.adapter(f"after@{number}").state == ready
            server.wire.retire("after", number)
            wait_until(nothing_held, what="the memory to be given back")

        kill_two(1)  # the pool's threads have what they keep
        settled = wait_until(lambda: steady(lambda: num_fds(server)), what="steady descriptors")
        for number in range(2, 5):
            kill_two(number)
        wait_until(lambda: num_fds(server) == settled, what="the descriptors to be closed")
        wait_until(
            lambda: server.wire.info().memory_bytes["adapters"] == 0, what="the adapters' memory"
        )


def steady(count) -> int | None:
    """What count() says, if it says the same for a while."""
    seen = set()
    for _ in range(20):
        seen.add(count())
        time.sleep(0.01)
    return seen.pop() if len(seen) == 1 else None


def test_a_trainer_killed_while_its_publish_waits_publishes_nothing(
    server, client, zoo, socket_path
) -> None:
    folder = zoo.adapter("slow", KIND)
    with victim(server, socket_path, folder, "killed", "wait") as trainer:
        # The pool has one thread, and this keeps it for a while.
        loads = [
            threading.Thread(target=server.wire.publish, args=("busy", folder)) for _ in range(32)
        ]
        for load in loads:
            load.start()
        wait_until(lambda: len(server.wire.list_adapters("busy")) == len(loads))
        os.kill(trainer.pid, signal.SIGUSR1)  # Publish now.
        wait_until(lambda: version_of(server, "killed@1"), what="the publish to be under way")
        trainer.kill()
        for load in loads:
            load.join()
    state = types_pb2.ADAPTER_STATE_LOADING
    wait_until(lambda: server.wire.adapter("killed@1").state != state)
    killed = server.wire.adapter("killed@1")
    assert killed.state == types_pb2.ADAPTER_STATE_FAILED
    assert "was closed before the version was published" in killed.failure
    for version in range(1, len(loads) + 1):
        client.retire("busy", version)


def test_a_call_that_was_given_up_is_withdrawn(server, client, zoo, socket_path) -> None:
    folder = zoo.adapter("slow", KIND)
    before = {item.version for item in server.wire.list_adapters("busy")}
    with dorad.SharedTensors(socket_path) as shared:
        loads = [
            threading.Thread(target=server.wire.publish, args=("busy", folder)) for _ in range(32)
        ]
        for load in loads:
            load.start()
        wait_until(lambda: len(server.wire.list_adapters("busy")) >= len(before) + len(loads))
        with pytest.raises(dorad.DeadlineExceeded):
            client.publish_from_memory("late", shared_memory=shared, timeout=0.05, **adapter(zoo))
        # The buffer serves the next publish, which has nothing to do with the last one.
        made = client.publish_from_memory("next", shared_memory=shared, **adapter(zoo, 1))
        for load in loads:
            load.join()
    late = version_of(server, "late@1")
    assert late is None or late.state == types_pb2.ADAPTER_STATE_FAILED
    assert made.state == "ready"
    for item in server.wire.list_adapters("busy"):
        if item.version not in before:
            client.retire("busy", item.version)
