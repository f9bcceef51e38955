"""The gateway over a fleet: its servers are the manifest's members that have its versions."""

import asyncio
import functools
import time

import dorad
import httpx
import numpy as np
import pytest
from dorad.fleet import manifest as m
from dorad.fleet.manifest_store import ManifestFile, change
from fake_server import FakeServer
from lib.gateway import ended_gateway, running_gateway
from lib.gateway_clients import COMPLETION
from lib.peers import ALLOWED
from lib.server import serve, wait_until

FILES = m.Files("a" * 64, "b" * 64, 7)
HOME = {**COMPLETION, "model": "a"}


@pytest.fixture
def store(tmp_path):
    return ManifestFile(tmp_path / "fleet.json")


@pytest.fixture
def three():
    with FakeServer() as one, FakeServer() as two, FakeServer() as three:
        yield one, two, three


def apply(store, how, *arguments):
    asyncio.run(change(store, lambda manifest: how(manifest, *arguments)))


def join(store, *servers):
    apply(store, m.renew, [server.target for server in servers], time.time() + 600)


def publish(server, value, name="a"):
    with dorad.Client(server.target, timeout=30) as client:
        tensors = {"w": np.full((2, 2), value, np.float32)}
        return client.publish(name, tensors=tensors, config={})


def commit(store, version):
    release = m.Release(version.version, FILES, f"upload-{version.version}")
    apply(store, m.prepare, version.name, m.Prepared(release, "one", 0.0))
    apply(store, m.commit, version.name, version.version, "one", version.digest)


@pytest.fixture
def http(store, three, tmp_path):
    join(store, *three[:2])
    with (
        running_gateway([], "--fleet", tmp_path / "fleet.json", scratch=tmp_path) as running,
        httpx.Client(base_url=running.url, timeout=60) as it,
    ):
        yield it


def ready(http):
    """The servers that get requests, by target."""
    lines = http.get("/metrics").text.splitlines()
    shown = [line for line in lines if line.startswith("dorad_gateway_server_ready{")]
    return {line.split('"')[1]: line.endswith(" 1.0") for line in shown}


def becomes_ready(http, *servers):
    wanted = [server.target for server in servers]
    wait_until(lambda: [at for at, yes in ready(http).items() if yes] == wanted, 30)


def calls(servers):
    return [len(server.generate_calls) for server in servers]


def pins(servers):
    """The references with a version of all prompts so far."""
    return {c.adapter for server in servers for c in server.generate_calls if "@" in c.adapter}


def version(http, body):
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["dorad"]["version"]


def test_members_join_and_leave_without_a_restart(http, store, three):
    becomes_ready(http, *three[:2])
    join(store, three[2])
    becomes_ready(http, *three)
    apply(store, m.leave, three[0].target)
    becomes_ready(http, *three[1:])
    for n in range(20):
        body = {**COMPLETION, "prompt": [n, n]}
        assert http.post("/v1/completions", json=body).status_code == 200
    assert calls(three[:1]) == [0] and min(calls(three[1:])) > 0


def test_a_member_that_lags_gets_no_requests_until_it_agrees(http, store, three):
    version = publish(three[0], 1)
    publish(three[1], 2)  # Version 1, too, with other bytes.
    commit(store, version)
    becomes_ready(http, three[0])
    for n in range(20):
        answer = http.post("/v1/completions", json={**HOME, "prompt": [n, n]})
        assert answer.status_code == 200, answer.text
    assert calls(three) == [20, 0, 0]
    with dorad.Client(three[1].target) as client:
        client.retire("a@1")
        three[1].versions.clear()
    publish(three[1], 1)
    becomes_ready(http, *three[:2])


def test_prompts_name_the_fleets_version_at_once(http, store, three):
    """Also where another one is active, and before the gateway has read the manifest again."""
    for server in three[:2]:
        first = publish(server, 1)
    commit(store, first)
    wait_until(lambda: version(http, HOME) == 1 and pins(three), 30)
    for server in three[:2]:
        server.generate_calls.clear()
        second = publish(server, 2)
    assert version(http, HOME) == 1
    for server in three[:2]:
        del server.versions["a", 1]
    commit(store, second)
    assert version(http, HOME) == 2
    assert pins(three) == {f"a@{v.version}:{v.digest}" for v in (first, second)}


def test_a_name_that_the_fleet_has_retired_is_not_found_also_where_a_server_has_it(
    http, store, three
):
    for server in three[:2]:
        version = publish(server, 1)
        publish(server, 1, "beside")
    commit(store, version)
    becomes_ready(http, *three[:2])
    apply(store, m.retire, "a", 1)
    wait_until(lambda: http.post("/v1/completions", json=HOME).status_code == 404, 30)
    assert http.post("/v1/completions", json={**HOME, "model": "beside"}).status_code == 200


def test_an_answer_that_has_begun_ends_after_its_server_has_left(http, store, three):
    apply(store, m.leave, three[1].target)
    becomes_ready(http, three[0])
    three[0].token_delay = 0.02
    body = {**COMPLETION, "max_tokens": 200, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        apply(store, m.leave, three[0].target)
        wait_until(lambda: ready(http) == {}, 30)
        rest = list(lines)
        assert "data: [DONE]" in rest and not any("error" in line for line in rest)
    assert http.post("/v1/completions", json=COMPLETION).status_code == 503


@pytest.mark.parametrize(
    ("arguments", "why"),
    [(["--target", "127.0.0.1:1"], "no --target"), (["--rl"], "a trainer publishes them")],
)
def test_what_does_not_go_with_a_fleet_is_a_usage_error(arguments, why):
    run = ended_gateway([], "--fleet", "x", *arguments)
    assert run.returncode == 64 and why in run.stderr, run


def test_real_servers_of_a_trainer(zoo, folder, store, tmp_path):
    """What a trainer publishes is what the gateway serves next."""
    settings = {"engine.kv_bytes": 16 << 20, "engine.threads": 1} | ALLOWED
    serving = functools.partial(serve, folder, settings=settings)
    manifest = tmp_path / "fleet.json"
    with (
        serving() as one,
        serving() as two,
        dorad.Fleet(manifest, [one.grpc, two.grpc]) as fleet,
    ):
        wait_until(lambda: [r.state for r in fleet.report()] == ["ready"] * 2, what="both")
        fleet.publish("a", path=zoo.adapter("llama2", "dora"), durable=False)
        with (
            running_gateway([], "--fleet", manifest, scratch=tmp_path) as running,
            httpx.Client(base_url=running.url, timeout=60) as http,
        ):
            wait_until(lambda: list(ready(http).values()) == [True, True], 30)
            body = {**HOME, "prompt": [1, 40, 77]}
            assert version(http, body) == 1
            fleet.publish("a", path=zoo.adapter("llama2", "lora"), durable=False)
            wait_until(lambda: version(http, body) == 2, 10)
