"""A manifest in a ConfigMap, against an API server that compares resourceVersions."""

import asyncio
import functools
import http.server
import json
import pickle
import threading

import dorad
import numpy as np
import pytest
from dorad.fleet import manifest as m
from dorad.fleet.config_map import ConfigMap
from dorad.fleet.manifest_store import ManifestFile, change
from dorad.fleet.stores import store_of
from fake_server import FakeServer

PATH = "/api/v1/namespaces/ml/configmaps/dorad-fleet"


class ApiServer(http.server.ThreadingHTTPServer):
    """One ConfigMap. `failing`: the status of the next calls."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.item = {"metadata": {"name": "dorad-fleet", "resourceVersion": "7"}}
        self.failing = 0
        self.tokens = set()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    def _answer(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _respond(self, replacement):
        with self.server.lock:
            self.server.tokens.add(self.headers["Authorization"])
            item = self.server.item
            if self.server.failing:
                self._answer(self.server.failing, {})
            elif self.path != PATH:
                self._answer(404, {})
            elif replacement is None:
                self._answer(200, item)
            else:
                version = item["metadata"]["resourceVersion"]
                if replacement["metadata"]["resourceVersion"] != version:
                    self._answer(409, {})
                    return
                replacement["metadata"]["resourceVersion"] = str(int(version) + 1)
                self.server.item = replacement
                self._answer(200, replacement)

    def do_GET(self):
        self._respond(None)

    def do_PUT(self):
        size = int(self.headers["Content-Length"])
        self._respond(json.loads(self.rfile.read(size)))

    def log_message(self, *args):
        pass


@pytest.fixture
def api():
    with ApiServer() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


@pytest.fixture
def account(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "namespace").write_text("ml")
    return tmp_path


@pytest.fixture
def store(api, account):
    return ConfigMap("dorad-fleet", api=api.url, account=account)


def test_an_empty_config_map_is_an_empty_manifest(store, api):
    assert asyncio.run(store.read()) == m.Manifest()
    assert api.tokens == {"Bearer secret"}


def test_of_two_changes_of_one_generation_one_is_made(store):
    async def main():
        one = m.renew(m.Manifest(), ["one:1"], 5.0)
        two = m.renew(m.Manifest(), ["two:1"], 5.0)
        won = await asyncio.gather(store.compare_and_set(0, one), store.compare_and_set(0, two))
        assert sorted(won) == [False, True]
        assert await store.read() == (one if won[0] else two)

    asyncio.run(main())


def test_processes_lose_none_of_their_changes(api, account):
    """Each has a store of its own; all write at the same time."""

    async def main():
        stores = [ConfigMap("dorad-fleet", api=api.url, account=account) for _ in range(4)]

        async def join(number, store):
            for round in range(5):
                added = functools.partial(m.renew, targets=[f"{number}-{round}:1"], until=5.0)
                await change(store, added)

        await asyncio.gather(*(join(number, store) for number, store in enumerate(stores)))
        manifest = await stores[0].read()
        assert (len(manifest.members), manifest.generation) == (20, 20)

    asyncio.run(main())


def test_a_store_survives_pickling(store):
    assert asyncio.run(pickle.loads(pickle.dumps(store)).read()) == m.Manifest()


def test_the_api_server_is_that_of_the_pod(account, monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    assert ConfigMap("x", account=account)._url == (
        "https://[fd00::1]:6443/api/v1/namespaces/ml/configmaps/x"
    )


def test_a_command_line_names_it_by_its_kind(account, monkeypatch, tmp_path):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    found = store_of("configmap:ml/dorad-fleet")
    assert isinstance(found, ConfigMap) and found._url == f"https://10.0.0.1:443{PATH}"
    assert store_of(found) is found
    assert isinstance(store_of(tmp_path / "configmap:x"), ManifestFile)


def test_what_else_the_config_map_has_stays(store, api):
    api.item["metadata"]["labels"] = {"kept": "yes"}
    asyncio.run(store.compare_and_set(0, m.renew(m.Manifest(), ["one:1"], 5.0)))
    assert api.item["metadata"]["labels"] == {"kept": "yes"}


@pytest.mark.parametrize("status", [403, 404, 500])
def test_failures_of_the_api_server_are_raised(store, api, status):
    api.failing = status
    for call in (store.read, lambda: store.compare_and_set(0, m.Manifest(1))):
        with pytest.raises(OSError, match=str(status)):
            asyncio.run(call())


def test_a_fleet_works_on_a_config_map(store, api):
    with FakeServer() as server, dorad.Fleet(store, [server.target]) as fleet:
        version = fleet.publish("a", tensors={"w": np.ones((2, 2), np.float32)}, config={})
        assert fleet.manifest().committed()["a"].digest == version.digest
        api.failing = 500  # The manifest of before is as good for prompts.
        (samples,) = fleet.generate_many([[1]], adapter="a", max_tokens=1)
        assert [span.label for span in samples[0].spans] == ["a@1"]
