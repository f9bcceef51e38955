"""Versions of adapters behind the endpoint picker: each pod has a gateway of its own server."""

import asyncio
import contextlib
import socket
import time
from typing import NamedTuple

import dorad
import httpx
import numpy as np
import pytest
from dorad.fleet import manifest as m
from dorad.fleet.manifest_store import ManifestFile, change
from fake_server import FakeServer
from lib import ext_proc
from lib.ext_proc import completion, pick, picking
from lib.gateway import running_gateway
from lib.server import wait_until

HOSTS = ["127.0.0.1", "127.0.0.2"]
PROMPTS = [[n, n + 1] for n in range(12)]


class Pods(NamedTuple):
    servers: list[FakeServer]
    stub: ext_proc.ExternalProcessorStub
    store: ManifestFile
    http: httpx.Client


def apply(store, how, *arguments):
    asyncio.run(change(store, lambda manifest: how(manifest, *arguments)))


def one_port():
    """That is free at every host."""
    while True:
        with contextlib.ExitStack() as stack:
            port = 0
            try:
                for host in HOSTS:
                    port = stack.enter_context(socket.create_server((host, port))).getsockname()[1]
            except OSError:
                continue
            return port


@pytest.fixture
def pods(tmp_path):
    store = ManifestFile(tmp_path / "fleet.json")
    port = one_port()
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(FakeServer(host=host)) for host in HOSTS]
        for server in servers:
            listen = ["--listen", f"{server.host}:{port}"]
            scratch = tmp_path / server.host
            scratch.mkdir()
            stack.enter_context(running_gateway(server.target, *listen, scratch=scratch))
        apply(store, m.renew, [server.target for server in servers], time.time() + 600)
        line = ["--fleet", tmp_path / "fleet.json", "--endpoint-port", port]
        stub = stack.enter_context(picking([], tmp_path, *line)).stub
        yield Pods(servers, stub, store, stack.enter_context(httpx.Client(timeout=60)))


def publish(server, value):
    with dorad.Client(server.target, timeout=30) as client:
        tensors = {"w": np.full((2, 2), value, np.float32)}
        return client.publish("a", tensors=tensors, config={})


def commit(pods, version):
    files = m.Files("a" * 64, "b" * 64, 7)
    release = m.Release(version.version, files, f"upload-{version.version}")
    apply(pods.store, m.prepare, "a", m.Prepared(release, "one", 0.0))
    apply(pods.store, m.commit, "a", version.version, "one", version.digest)


def ask(pods, model, prompt=(1, 2)):
    """As a proxy: the pod's status, and the version that it names, or its reason."""
    address = pick(pods.stub, completion(list(prompt), model))
    body = {"model": model, "prompt": list(prompt), "max_tokens": 2}
    answer = pods.http.post(f"http://{address}/v1/completions", json=body)
    if answer.status_code != 200:
        return answer.status_code, answer.json()["error"]["code"]
    return 200, answer.json()["choices"][0]["dorad"]["version"]


def all_of(pods, model):
    """Of prompts with homes at each pod."""
    return {ask(pods, model, prompt) for prompt in PROMPTS}


@pytest.fixture
def versions(pods):
    """Both have versions 1 and 2, and 2 is the fleet's; the second one has lost 1."""
    for server in pods.servers:
        found = [publish(server, 1), publish(server, 2)]
    commit(pods, found[1])
    del pods.servers[1].versions["a", 1]
    return found


def test_a_named_version_is_honoured_where_it_is_and_refused_where_it_is_nowhere(pods, versions):
    """Also one that only some members have, as after a join."""
    first, second = versions
    for ref in ("a@1", f"a@1:{first.digest[:12]}"):
        wait_until(lambda ref=ref: all_of(pods, ref) == {(200, 1)}, 30)
        assert all_of(pods, ref) == {(200, 1)}
    pods.servers[0].generate_calls.clear()
    assert all_of(pods, "a@2") == {(200, 2)}
    assert all(server.generate_calls for server in pods.servers)
    for nowhere in ("a@3", f"a@1:{second.digest}", "other@1"):
        assert all_of(pods, nowhere) == {(404, "ADAPTER_NOT_FOUND")}, nowhere


def test_a_name_goes_where_the_fleets_version_is_active(pods, versions):
    """A member may have it ready and another one active: its activation has failed."""
    with dorad.Client(pods.servers[1].target) as client:
        pods.servers[1].versions["a", 1] = pods.servers[0].versions["a", 1]
        client.activate("a@1")
    wait_until(lambda: all_of(pods, "a") == {(200, 2)}, 30)
    assert all_of(pods, "a") == {(200, 2)}


def test_requests_of_a_sequence_meet_on_one_pod_also_once_they_name_the_version(pods, versions):
    wait_until(lambda: all_of(pods, "a@1") == {(200, 1)}, 30)  # It knows the servers.
    for server in pods.servers:
        server.generate_calls.clear()
    for prompt in PROMPTS:
        status, version = ask(pods, "a", prompt)
        assert ask(pods, f"a@{version}", prompt) == (status, version) == (200, 2)
    met = [[call.prompt_token_ids for call in server.generate_calls] for server in pods.servers]
    assert not set(met[0]) & set(met[1]) and all(met)
