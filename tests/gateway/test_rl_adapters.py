"""Adapters that RL libraries load, name and unload over HTTP."""

import contextlib
import json
import os
import shutil

import httpx
import pytest
from lib.gateway import running_gateway
from lib.server import serve, wait_until
from lib.tokens import write_tokens

IDS = [1, 40, 77, 120, 33]


def load(rl, name, path, route="/v1/load_lora_adapter", **fields):
    answer = rl.post(route, json={"lora_name": name, "lora_path": str(path), **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def complete(rl, model, **fields):
    body = {"model": model, "prompt": IDS, "max_tokens": 8, "temperature": 0, "logprobs": 0}
    answer = rl.post("/v1/completions", json={**body, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def refused(answer, status, reason, param=None):
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, reason), answer.text
    assert isinstance(error["message"], str) and error["type"]
    if param:
        assert error["param"] == param


class Running:
    """A streamed request in the middle of its answer."""

    def __init__(self, rl_client, events):
        self._client = rl_client
        self._events = events
        self._first = next(events)

    def digests(self):
        """Of the versions of its tokens. Ends it, but not before it got more of them."""
        steps = self._client.info().engine.steps
        wait_until(lambda: self._client.info().engine.steps > steps + 5, what="more tokens")
        assert self._client.abort(all=True) == 1
        found = {}
        for event in (self._first, *self._events):
            (choice,) = event["choices"]
            for span in choice.get("dorad", {"spans": []})["spans"]:
                found[span["digest"]] = span["end"]
        assert choice["finish_reason"] == "abort"
        assert list(found.values()) == sorted(set(found.values()))
        return list(found)


@pytest.fixture
def begin(rl, rl_client):
    with contextlib.ExitStack() as stack:

        def started(model, **fields):
            body = {"model": model, "prompt": IDS, "max_tokens": 8000, "ignore_eos": True}
            request = rl.stream("POST", "/v1/completions", json={**body, "stream": True, **fields})
            lines = stack.enter_context(request).iter_lines()
            return Running(rl_client, (json.loads(it[6:]) for it in lines if "{" in it))

        yield started


@pytest.mark.parametrize("name", ["trl-policy-v1", "Policy_V2", "Qwen/Qwen3-0.6B:run 7"])
def test_a_loaded_adapter_is_a_model_under_its_name(rl, rl_client, adapter_root, name):
    answer = load(rl, name, adapter_root / "dora-0")
    assert answer["status"] == "ok" and answer["lora_name"] == name
    choice = complete(rl, name)
    assert choice["dorad"]["adapter"] == name and choice["dorad"]["digest"] == answer["digest"]
    listed = {row["id"]: row for row in rl.get("/v1/models").json()["data"]}
    base, *_ = listed
    assert listed[name]["parent"] == base and listed[name]["root"] == f"{name}@{answer['version']}"
    assert rl.get(f"/v1/models/{name}").json()["id"] == name
    assert complete(rl, f"{name}@{answer['version']}") == choice
    assert complete(rl, base)["logprobs"] != choice["logprobs"]
    answer = rl.post("/v1/unload_lora_adapter", json={"lora_name": name})
    assert answer.status_code == 200, answer.text
    body = {"model": name, "prompt": IDS}
    refused(rl.post("/v1/completions", json=body), 404, "ADAPTER_NO_ACTIVE_VERSION")
    refused(rl.post("/v1/unload_lora_adapter", json={"lora_name": name}), 404, "ADAPTER_NOT_FOUND")
    assert name not in {row["id"] for row in rl.get("/v1/models").json()["data"]}


@pytest.mark.parametrize(
    "route", ["/v1/load_lora_adapter", "/load_lora_adapter", "/skyrl/v1/load_lora_adapter"]
)
def test_a_name_loaded_again_is_the_new_adapter(rl, rl_client, adapter_root, route):
    first = load(rl, "again", adapter_root / "dora-0", route)
    second = load(rl, "again", adapter_root / "dora-1", route, load_inplace=True)
    third = load(rl, "again", adapter_root / "lora-0", route)
    assert len({a["digest"] for a in (first, second, third)}) == 3
    assert complete(rl, "again")["dorad"]["digest"] == third["digest"]
    # Only the version before is kept.
    ready = [v.version for v in rl_client.adapters("again") if v.state == "ready"]
    assert ready == [second["version"], third["version"]]


@pytest.mark.parametrize("chosen_by", ["load", "request", "gateway"])
def test_requests_in_flight_follow_the_name_by_their_policy(rl, adapter_root, begin, chosen_by):
    name = f"flight-{chosen_by}"
    pin = {"in_flight_policy": "pin"}
    first = load(rl, name, adapter_root / "dora-0", **(pin if chosen_by == "load" else {}))
    running = begin(name, **(pin if chosen_by == "request" else {}))
    second = load(rl, name, adapter_root / "dora-1")
    wanted = [first["digest"], second["digest"]]
    assert running.digests() == (wanted if chosen_by == "gateway" else wanted[:1])


def test_an_unloaded_version_in_flight_goes_on(rl, adapter_root, begin):
    loaded = load(rl, "leaving-v1", adapter_root / "dora-0")
    running = begin("leaving-v1")
    assert rl.post("/unload_lora_adapter", json={"lora_name": "leaving-v1"}).status_code == 200
    body = {"model": "leaving-v1", "prompt": IDS}
    refused(rl.post("/v1/completions", json=body), 404, "ADAPTER_NO_ACTIVE_VERSION")
    assert running.digests() == [loaded["digest"]]


# --- Paths ----------------------------------------------------------------------------------------


@pytest.fixture
def outside(adapter_root, tmp_path):
    return shutil.copytree(adapter_root / "dora-0", tmp_path / "outside")


def post(rl, path):
    return rl.post("/v1/load_lora_adapter", json={"lora_name": "p", "lora_path": str(path)})


def test_only_folders_below_a_root_are_read(rl, adapter_root, outside):
    refused(post(rl, outside), 403, "PATH_NOT_ALLOWED", "lora_path")
    refused(post(rl, adapter_root / ".." / ".." / "etc"), 403, "PATH_NOT_ALLOWED")
    refused(post(rl, adapter_root / "dora-0" / ".." / ".."), 403, "PATH_NOT_ALLOWED")
    refused(post(rl, "dora-0"), 400, "PATH_NOT_ABSOLUTE")
    refused(post(rl, f"{adapter_root}/x\0y"), 400, "PATH_TOO_LONG")
    refused(post(rl, adapter_root / "nothing"), 404, "ADAPTER_FOLDER_NOT_FOUND")
    refused(post(rl, adapter_root), 404, "FILE_NOT_FOUND")


def test_nothing_is_told_of_folders_outside(rl, outside, tmp_path):
    there, missing = (post(rl, path) for path in (outside, tmp_path / "missing"))
    assert (
        there.json()["error"]["message"].replace("outside", "missing")
        == (missing.json()["error"]["message"])
    )


def test_links_count_as_what_they_lead_to(rl, adapter_root, outside):
    made = []
    try:
        for name, target in (("in", adapter_root / "dora-0"), ("out", outside), ("no", "/absent")):
            made.append(adapter_root / f"link-{name}")
            made[-1].symlink_to(target)
        assert post(rl, adapter_root / "link-in").status_code == 200
        refused(post(rl, adapter_root / "link-out"), 403, "PATH_NOT_ALLOWED")
        refused(post(rl, adapter_root / "link-no"), 403, "PATH_NOT_ALLOWED")
    finally:
        for link in made:
            link.unlink()


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_file_outside_is_not_read_through_a_link(rl, adapter_root, outside, tmp_path, name):
    folder = shutil.copytree(outside, adapter_root / "linked")
    try:
        (folder / name).unlink()
        (folder / name).symlink_to(outside / name)
        refused(post(rl, folder), 403, "PATH_NOT_ALLOWED")
        (folder / name).unlink()
        (folder / name).symlink_to(adapter_root / "dora-1" / name)
        assert post(rl, folder).status_code == 200
        (folder / name).unlink()
        os.mkfifo(folder / name)
        refused(post(rl, folder), 404, "FILE_NOT_FOUND")
    finally:
        shutil.rmtree(folder)


def test_an_adapter_that_does_not_fit_is_refused_with_every_problem(rl, adapter_root):
    folder = shutil.copytree(adapter_root / "dora-0", adapter_root / "broken")
    try:
        config = folder / "adapter_config.json"
        config.write_text(config.read_text().replace('"r": 8', '"r": 7'))
        answer = post(rl, folder)
        assert answer.status_code == 400 and answer.json()["error"]["violations"]
        config.write_bytes(b"\xff")
        refused(post(rl, folder), 400, "JSON_SYNTAX")
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"lora_name": "a@1", "lora_path": "/x"}, "lora_name"),
        ({"lora_name": "", "lora_path": "/x"}, "lora_name"),
        ({"lora_name": "a"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "/x", "rank": 3}, "rank"),
        ({"lora_name": "a", "lora_path": "/x", "is_3d_lora_weight": True}, "is_3d_lora_weight"),
        ({"lora_name": "a", "lora_path": "/x", "in_flight_policy": "x"}, "in_flight_policy"),
    ],
)
def test_what_a_load_cannot_honour_is_refused_by_its_name(rl, fields, param):
    answer = rl.post("/v1/load_lora_adapter", json=fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_the_base_model_is_not_replaced(rl, adapter_root):
    base = rl.get("/v1/models").json()["data"][0]["id"]
    fields = {"lora_name": base, "lora_path": str(adapter_root / "dora-0")}
    refused(rl.post("/load_lora_adapter", json=fields), 400, "FIELD_INVALID", "lora_name")


# --- Roles, several servers -----------------------------------------------------------------------


@pytest.fixture
def small_root(zoo):
    """Of adapters of the other server's model."""
    return zoo.adapter("llama2", "dora").parent


def test_the_servers_roles_decide(folder, small_root, tmp_path):
    file = tmp_path / "tokens.json"
    roles = {"worker": ["infer"], "trainer": ["publish"], "boss": ["admin"]}
    write_tokens(file, {name: ("t", given) for name, given in roles.items()}, {})
    settings = {"security.tokens_file": file}
    arguments = ["--rl", "--adapter-root", small_root, "--token", "worker-token"]
    with (
        serve(folder, settings=settings) as server,
        running_gateway(server.grpc, *arguments, scratch=tmp_path) as gateway,
        httpx.Client(base_url=gateway.url, timeout=60) as http,
    ):
        fields = {"lora_name": "roles", "lora_path": str(small_root / "llama2-dora-0")}
        controls = ("/pause?mode=keep", "/resume", "/sleep", "/wake_up")

        def status(route, who, body=None):
            headers = {} if who is None else {"authorization": f"Bearer {who}-token"}
            return http.post(route, json=body, headers=headers).status_code

        for route in ("/v1/load_lora_adapter", *controls):
            assert status(route, None, fields if "load" in route else None) == 401
            assert status(route, "worker", fields if "load" in route else None) == 403
        assert status("/v1/load_lora_adapter", "trainer", fields) == 200
        assert [status(route, "trainer") for route in controls] == [403] * 4
        assert [status(route, "boss") for route in controls] == [200] * 4
        assert status("/v1/unload_lora_adapter", "worker", {"lora_name": "roles"}) == 403
        assert status("/v1/unload_lora_adapter", "trainer", {"lora_name": "roles"}) == 200


def test_a_load_reaches_every_server(folder, small_root, tmp_path):
    with serve(folder) as one, serve(folder) as two:
        targets = [one.grpc, two.grpc]
        arguments = ["--rl", "--adapter-root", small_root]
        with (
            running_gateway(targets, *arguments, scratch=tmp_path) as gateway,
            httpx.Client(base_url=gateway.url, timeout=60) as http,
        ):
            loaded = load(http, "Both", small_root / "llama2-dora-0")
            for server in (one, two):
                (version,) = server.wire.list_adapters()
                assert version.digest == loaded["digest"] and version.active
            assert http.get("/get_world_size").json() == {"world_size": 2}
            assert http.post("/pause").status_code == 200
            assert all(s.wire.info().engine.paused for s in (one, two))
            assert http.post("/resume").status_code == 200
            assert not any(s.wire.info().engine.paused for s in (one, two))


def test_without_a_root_nothing_is_loaded(rl_server, adapter_root, tmp_path):
    with (
        running_gateway(rl_server.grpc, "--rl", scratch=tmp_path) as gateway,
        httpx.Client(base_url=gateway.url, timeout=60) as http,
    ):
        refused(post(http, adapter_root / "dora-0"), 403, "PATH_NOT_ALLOWED")
        assert http.get("/server_info").json()["vllm_config"]["lora_config"] is None
