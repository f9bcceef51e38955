"""What the endpoint picker knows of its servers' load and of itself, and what it makes of it."""

import asyncio
import contextlib
import time
import urllib.request
from pathlib import Path

import dorad
import pytest
from dorad._routing import FULL_KV, FULL_QUEUE, affinity, text_key
from dorad.fleet import manifest as m
from dorad.fleet.manifest_store import ManifestFile, change
from fake_server import FakeServer
from grpc_health.v1 import health_pb2
from lib.ext_proc import PORT, completion, exchange, pick, picking
from lib.server import parse_metrics, wait_until
from prometheus_client.parser import text_string_to_metric_families

BODY = completion("Hello", "a")
GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "fleet.md"


@pytest.fixture
def servers():
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(FakeServer(host=f"127.0.0.{n}")) for n in (1, 2, 3)]
        key = text_key("a", "Hello")
        yield sorted(found, key=lambda server: -affinity(server.target, key))


@pytest.fixture
def picker(servers, tmp_path):
    """Of a fleet, whose members it looks at every second. The first server is the home of BODY."""
    until = time.time() + 600
    store = ManifestFile(tmp_path / "fleet.json")
    members = [server.target for server in servers]
    asyncio.run(change(store, lambda manifest: m.renew(manifest, members, until)))
    with picking([], tmp_path, "--fleet", tmp_path / "fleet.json") as found:
        yield found


def page(picker):
    with urllib.request.urlopen(picker.metrics, timeout=30) as response:
        return response.read().decode()


def metrics(picker):
    return parse_metrics(page(picker))


def pod(server):
    return f"{server.host}:{PORT}"


def told(picker, servers, name):
    found = metrics(picker)
    return [found[f'dorad_picker_{name}{{server="{server.target}"}}'] for server in servers]


def of_reason(picker, reason):
    return metrics(picker).get(f'dorad_picker_picks_total{{reason="{reason}"}}', 0)


def test_what_others_send_to_a_server_counts(picker, servers):
    assert pick(picker.stub, BODY) == pod(servers[0])
    servers[0].running_of_others = 20
    wait_until(lambda: told(picker, servers, "server_load") == [20, 0, 0], 30)
    assert pick(picker.stub, BODY) == pod(servers[1])
    assert (of_reason(picker, "home"), of_reason(picker, "bound")) == (1, 1)
    # Equal loads, however high: the home has no more than its share.
    for server in servers:
        server.running_of_others = 20
    wait_until(lambda: told(picker, servers, "server_load") == [20] * 3, 30)
    assert pick(picker.stub, BODY) == pod(servers[0])
    # Without a home the load decides, too.
    servers[2].running_of_others = 0
    wait_until(lambda: told(picker, servers, "server_load") == [20, 20, 0], 30)
    assert pick(picker.stub, b"no JSON") == pod(servers[2])
    assert of_reason(picker, "least") == 1


@pytest.mark.parametrize(
    ("change", "name", "most"),
    [
        ({"queued": FULL_QUEUE + 1}, "server_queued_requests", FULL_QUEUE),
        ({"kv_pages_used": 91}, "server_kv_use", FULL_KV),
    ],
)
def test_a_full_server_is_passed_over_while_another_has_room(picker, servers, change, name, most):
    def fill(filled):
        for server in filled:
            vars(server).update(change)
        full = [server in filled for server in servers]
        wait_until(lambda: [v > most for v in told(picker, servers, name)] == full, 30)

    fill(servers[:1])
    # Others have as much to do, so that the bound is not what decides.
    for server in servers[1:]:
        server.running_of_others = change.get("queued", 0)
    loads = [change.get("queued", 0)] * 3
    wait_until(lambda: told(picker, servers, "server_load") == loads, 30)
    assert pick(picker.stub, BODY) == pod(servers[1])
    assert of_reason(picker, "full") == 1
    for server in servers[1:]:
        server.running_of_others = 0
    fill(servers)
    wait_until(lambda: len(set(told(picker, servers, "server_load"))) == 1, 30)
    assert pick(picker.stub, BODY) == pod(servers[0])


def test_what_has_begun_and_ended_since_the_last_look_counts(picker, servers):
    with exchange(picker.stub) as it:
        it.headers()
        it.body(BODY)
        for _ in range(2):
            it.next()
        assert sorted(told(picker, servers, "server_load")) == [0, 0, 1]
        assert metrics(picker)["dorad_picker_requests_in_flight"] == 1
    wait_until(lambda: told(picker, servers, "server_load") == [0, 0, 0], 30)
    assert metrics(picker)["dorad_picker_requests_in_flight"] == 0


def outcomes(picker):
    found = metrics(picker)
    kinds = ("chosen", "no_server", "body_too_long", "ended")
    name = "dorad_picker_requests_total"
    return [found.get(f'{name}{{outcome="{outcome}"}}', 0) for outcome in kinds]


def test_each_request_has_one_outcome(picker, servers):
    pick(picker.stub, BODY)
    with exchange(picker.stub, subset=["10.0.0.1:1"]) as it:
        it.headers()
        it.body(BODY)
        assert it.next().immediate_response.status.code == 503
    with exchange(picker.stub) as it:
        it.headers()
        it.body(b"x" * (2 << 20), b"x" * (2 << 20), b"x")
        assert it.next().immediate_response.status.code == 413
    with exchange(picker.stub) as it:
        it.headers()
    wait_until(lambda: outcomes(picker) == [1, 1, 1, 1], 30)


def test_it_shows_which_servers_get_requests_and_how_old_that_is(picker, servers):
    assert told(picker, servers, "server_ready") == [1, 1, 1]
    servers[1].health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    wait_until(lambda: told(picker, servers, "server_ready") == [1, 0, 1], 30)
    assert 0 <= metrics(picker)["dorad_picker_look_age_seconds"] < 20
    assert told(picker, servers, "server_versions_behind") == [0, 0, 0]
    (labels,) = [of for of in metrics(picker) if of.startswith("dorad_picker_build_info")]
    assert f'version="{dorad.__version__}"' in labels


def test_every_metric_is_in_the_guide(picker):
    pick(picker.stub, BODY)
    guide = GUIDE.read_text()
    for family in text_string_to_metric_families(page(picker)):
        name = family.name + ("_total" if family.type == "counter" else "")
        if not name.startswith("process_") and not name.endswith("_created"):
            assert f"`{name}`" in guide, name
