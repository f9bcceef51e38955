"""kill -9 of clients in the middle of their calls leaves nothing behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from dorad.v1 import types_pb2
from lib.server import ROOT, serve, wait_until
from lib.tiers import deep

KILLS = 200 if deep() else 50
AT_ONCE = 10
KINDS = ["generate", "generate", "slow_reader", "score", "publish"]


@pytest.fixture
def nursery():
    """The program that forks victims."""
    paths = [str(ROOT / "tests"), str(ROOT / "client" / "src")]
    process = subprocess.Popen(
        [sys.executable, "-m", "lib.victims"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*paths, *sys.path])},
        text=True,
    )
    yield process
    process.stdin.close()
    process.wait(60)


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.mark.timeout(240)
def test_killed_clients_leave_nothing_behind(zoo, nursery) -> None:
    adapters = {"a": zoo.adapter("slow", "dora")}
    settings = {"engine.kv_bytes": 512 << 20, "engine.prefix_cache": False}
    with serve(zoo.model("slow"), adapters, settings) as server:
        files_before = open_files(server.pid)
        adapters_before = len(server.wire.list_adapters())
        seen_running = 0
        for first in range(0, KILLS, AT_ONCE):
            for index in range(first, first + AT_ONCE):
                nursery.stdin.write(f"{server.grpc} {KINDS[index % len(KINDS)]}\n")
            nursery.stdin.flush()
            victims = [int(nursery.stdout.readline()) for _ in range(AT_ONCE)]
            engine = server.wire.info().engine
            seen_running += engine.running_sequences + engine.queued_requests
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
        assert seen_running > KILLS / 2, "the victims were not in the middle of anything"

        def nothing_left() -> bool:
            engine = server.wire.info().engine
            return (
                engine.running_sequences,
                engine.queued_requests,
                engine.kv_pages_used,
                engine.adapter_leases,
            ) == (0, 0, 0, 0)

        wait_until(nothing_left, 60, "no sequences, pages and leases left")
        wait_until(lambda: open_files(server.pid) <= files_before + 3, 60, "the connections closed")
        loading = [
            item
            for item in server.wire.list_adapters()
            if item.state == types_pb2.ADAPTER_STATE_LOADING
        ]
        assert loading == []
        ready = [
            item
            for item in server.wire.list_adapters()
            if item.state == types_pb2.ADAPTER_STATE_READY
        ]
        assert len(ready) == adapters_before == 1
        (sample,) = server.wire.generate([5, 6, 7], adapter="a", max_tokens=5, ignore_eos=True)
        assert len(sample.tokens) == 5
