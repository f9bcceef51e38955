"""nginx in front of a fleet: its list of servers follows the manifest."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import time

import dorad
import numpy as np
import pytest
from dorad.fleet import manifest as m
from dorad.fleet.manifest_store import ManifestFile, change
from fake_server import FakeServer
from grpc_health.v1 import health_pb2
from lib.nginx import nginx
from lib.server import environment, wait_until

AWAY = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def servers():
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(FakeServer()) for _ in range(3)]


@pytest.fixture
def store(tmp_path):
    return ManifestFile(tmp_path / "fleet.json")


@contextlib.contextmanager
def following(store_path, proxy):
    line = [sys.executable, "-c", "from dorad.cli import main; main()", "fleet", "proxy"]
    line += [store_path, proxy.folder / "dorad-servers.conf"]
    line += ["--pid-file", proxy.folder / "nginx.pid"]
    with subprocess.Popen(list(map(str, line)), env=environment(), stderr=subprocess.PIPE) as run:
        try:
            yield
        finally:
            run.send_signal(signal.SIGTERM)
            _, logged = run.communicate(timeout=30)
    assert run.returncode == 0 and b"Traceback" not in logged, logged


def apply(store, how, *arguments):
    asyncio.run(change(store, lambda manifest: how(manifest, *arguments)))


def join(store, *servers):
    apply(store, m.renew, [server.target for server in servers], time.time() + 600)


def asked(proxy, servers):
    """Which servers get calls for many adapters."""
    before = [len(server.routing.seen) for server in servers]
    credentials = proxy.credentials()
    target = f"localhost:{proxy.public}"
    with dorad.Client(target, credentials=credentials, timeout=20) as client:
        for n in range(24):
            with contextlib.suppress(dorad.NotFound):
                client.generate([1], adapter=f"any{n}", max_tokens=1)
    return [
        any(method == "Generate" for method, _ in server.routing.seen[count:])
        for server, count in zip(servers, before, strict=True)
    ]


def test_nginx_has_the_members_with_the_fleets_versions(servers, store, tmp_path):
    join(store, *servers[:2])
    with nginx([servers[0].target]) as proxy, following(tmp_path / "fleet.json", proxy):
        listed = proxy.folder / "dorad-servers.conf"

        def lists(*wanted):
            lines = sorted(f"server {server.target} max_fails=0;" for server in wanted)
            return listed.read_text().splitlines() == lines

        wait_until(lambda: lists(*servers[:2]), 30)
        wait_until(lambda: asked(proxy, servers) == [True, True, False], 30)
        # A server that is away stays: nginx passes over it.
        servers[0].health.set("", AWAY)
        join(store, servers[2])
        wait_until(lambda: lists(*servers), 30)
        servers[0].health.set("", health_pb2.HealthCheckResponse.SERVING)
        with dorad.Client(servers[1].target) as client:
            version = client.publish("a", tensors={"w": np.ones((2, 2), np.float32)}, config={})
        release = m.Release(1, m.Files("a" * 64, "b" * 64, 7), "upload")
        apply(store, m.prepare, "a", m.Prepared(release, "one", 0.0))
        apply(store, m.commit, "a", 1, "one", version.digest)
        wait_until(lambda: lists(servers[1]), 30)
        wait_until(lambda: asked(proxy, servers) == [False, True, False], 30)
        # The last one stays, too: nginx refuses an empty list.
        apply(store, m.leave, servers[1].target)
        with pytest.raises(AssertionError):
            wait_until(lambda: not lists(servers[1]), 3)
