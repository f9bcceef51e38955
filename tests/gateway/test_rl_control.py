"""Pausing, sleeping and facts, with the requests that RL libraries send."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from lib.gateway import running_gateway
from lib.server import serve, wait_until

IDS = [1, 40, 77, 120, 33]
MANY = 8000  # Tokens: more than a test waits for.


def complete(rl, **fields):
    body = {"prompt": IDS, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True, "seed": 3}
    answer = rl.post("/v1/completions", json={**body, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


@pytest.fixture
def background(rl):
    """Runs requests meanwhile."""
    with ThreadPoolExecutor(4) as pool:
        yield lambda **fields: pool.submit(complete, rl, **fields)


def engine(rl_client):
    return rl_client.info().engine


def wait_for_running(rl_client):
    wait_until(lambda: engine(rl_client).running_sequences, what="a running request")


def ok(answer, **wanted):
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert wanted.items() <= answer.json().items()


@pytest.mark.parametrize("query", [{"mode": "keep"}, {"mode": "keep", "clear_cache": "false"}])
def test_keep_freezes_requests_until_resume(rl, rl_client, background, query):
    alone = complete(rl, max_tokens=300)
    answer = background(max_tokens=300)
    wait_for_running(rl_client)
    ok(rl.post("/pause", params=query), status="paused")
    assert rl.get("/is_paused").json() == {"is_paused": True}
    assert not answer.done() or answer.result() == alone  # It may have ended just before.
    waiting = background()
    wait_until(lambda: engine(rl_client).queued_requests or waiting.done(), what="a new request")
    assert not waiting.done()
    ok(rl.post("/resume"), status="resumed")
    assert rl.get("/is_paused").json() == {"is_paused": False}
    assert answer.result(60) == alone and len(waiting.result(60)["token_ids"]) == 6


@pytest.mark.parametrize(
    ("route", "query", "body", "wanted"),
    [
        ("/pause", {}, None, {"status": "paused", "requests": 1}),
        ("/pause", {"mode": "abort", "clear_cache": "true"}, None, {"status": "paused"}),
        ("/areal_pause_generation", {}, {}, {"success": True}),
    ],
)
def test_abort_ends_requests_with_their_tokens(
    rl, rl_client, background, route, query, body, wanted
):
    answer = background(max_tokens=MANY, logprobs=0, return_tokens_as_token_ids=True)
    wait_for_running(rl_client)
    ok(rl.post(route, params=query, json=body), **wanted)
    ended = answer.result(60)
    assert ended["finish_reason"] == "abort" and len(ended["token_ids"]) < MANY
    assert ended["logprobs"]["tokens"] == [f"token_id:{i}" for i in ended["token_ids"]]
    ok(rl.post("/areal_continue_generation", json={}), success=True)
    assert len(complete(rl)["token_ids"]) == 6


@pytest.mark.parametrize("query", [{"mode": "wait"}, {"wait_for_inflight_requests": "true"}])
def test_wait_lets_requests_end_and_new_ones_wait(rl, rl_server, rl_client, background, query):
    before = refusals(rl_server, "ENGINE_PAUSED")
    answer = background(max_tokens=200)
    wait_for_running(rl_client)
    ok(rl.post("/pause", params=query), status="paused")
    assert len(answer.result(60)["token_ids"]) == 200
    waiting = background()
    # The server refuses it, and the gateway asks again.
    wait_until(lambda: refusals(rl_server, "ENGINE_PAUSED") > before, what="a refusal")
    assert not waiting.done()
    ok(rl.post("/resume"))
    assert len(waiting.result(60)["token_ids"]) == 6


@pytest.mark.parametrize(
    ("sleep", "wake", "asleep"),
    [
        ({"level": "1"}, {}, {"weights", "kv", "adapters"}),
        ({"level": "2", "tags": ["weights", "kv_cache"]}, {}, {"weights", "kv", "adapters"}),
        ({"tags": "kv_cache"}, {"tags": "kv_cache"}, {"kv"}),
        ({"tags": ["weights"]}, {"tags": ["weights"]}, {"weights", "adapters"}),
        ({}, {"tags": ["weights", "kv_cache"]}, {"weights", "kv", "adapters"}),
    ],
)
def test_memory_sleeps_and_wakes_by_tags(rl, rl_client, sleep, wake, asleep):
    before = complete(rl)
    ok(rl.post("/sleep", params=sleep), status="sleeping")
    assert set(engine(rl_client).sleeping) == asleep
    assert rl.get("/is_sleeping").json() == {"is_sleeping": True}
    ok(rl.post("/wake_up", params=wake), status="awake")
    assert rl.get("/is_sleeping").json() == {"is_sleeping": False}
    assert complete(rl) == before


def test_tags_may_wake_one_after_the_other(rl, rl_client):
    ok(rl.post("/sleep", json={}))
    ok(rl.post("/wake_up", params={"tags": "weights"}, json={}))
    assert engine(rl_client).sleeping == ["kv"]
    assert rl.get("/is_sleeping").json() == {"is_sleeping": True}


def test_the_server_info_is_what_clients_read_of_vllms(rl, rl_client):
    answer = rl.get("/server_info", params={"config_format": "json"})
    info, config = rl_client.info(), answer.json()["vllm_config"]
    dtype = {"fp32": "torch.float32", "bf16": "torch.bfloat16"}[info.model.compute_dtype]
    model = config["model_config"]
    assert (model["dtype"], model["max_model_len"]) == (dtype, info.model.context_length)
    assert model["logprobs_mode"] == "raw_logprobs"
    assert config["lora_config"]["max_lora_rank"] == info.limits.max_adapter_rank
    assert config["lora_config"]["max_loras"] >= 1000
    assert config["parallel_config"]["data_parallel_size"] == 1
    assert config["weight_transfer_config"] is None
    # SkyRL sends a body with this GET.
    assert rl.request("GET", "/get_world_size", json={}).json() == {"world_size": 1}
    assert rl.get("/get_world_size").json() == {"world_size": 1}


def test_an_empty_body_may_be_a_stream_of_octets(rl, rl_client):
    """As aiohttp sends it for SkyRL."""
    octets = {"content-type": "application/octet-stream"}
    ok(rl.post("/pause", params={"mode": "keep"}, headers=octets), status="paused")
    ok(rl.post("/resume", headers=octets), status="resumed")
    assert rl.post("/pause", content=b"{}", headers=octets).status_code == 415
    assert not engine(rl_client).paused


def test_what_has_no_effect_is_taken(rl):
    ok(rl.post("/reset_prefix_cache"), success=True)
    ok(rl.post("/reset_prefix_cache", json={"reset_running_requests": False}), success=True)
    ok(rl.post("/finish_session", params={"session_id": "s1"}), success=True)


@pytest.mark.parametrize(
    ("route", "query", "param"),
    [
        ("/pause", {"mode": "freeze"}, "mode"),
        ("/pause", {"clear_cache": "perhaps"}, "clear_cache"),
        ("/pause", {"clear": "true"}, "clear"),
        ("/resume", {"mode": "keep"}, "mode"),
        ("/sleep", {"level": "0"}, "level"),
        ("/sleep", {"tags": "adapters"}, "tags[0]"),
        ("/sleep", {"mode": "abort"}, "mode"),
        ("/wake_up", {"tags": "scheduling"}, "tags[0]"),
        ("/reset_prefix_cache", {"reset_running_requests": "true"}, "reset_running_requests"),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(rl, rl_client, route, query, param):
    answer = rl.post(route, params=query)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert not engine(rl_client).paused and not engine(rl_client).sleeping


def refusals(server, reason):
    return sum(count for name, count in server.metrics().items() if reason in name)


def test_requests_wait_for_a_place_in_a_full_queue(folder, tmp_path):
    body = {"prompt": IDS, "max_tokens": 4, "ignore_eos": True}
    with (
        serve(folder, settings={"limits.max_queued_requests": 2}) as server,
        running_gateway(server.grpc, "--rl", scratch=tmp_path) as gateway,
        httpx.Client(base_url=gateway.url, timeout=60) as http,
        ThreadPoolExecutor(8) as pool,
    ):
        ok(http.post("/pause", params={"mode": "keep"}))
        sent = [pool.submit(http.post, "/v1/completions", json=body) for _ in range(8)]
        wait_until(lambda: refusals(server, "QUEUE_FULL"), what="a full queue")
        ok(http.post("/resume"))
        assert {answer.result().status_code for answer in sent} == {200}


@pytest.mark.parametrize("route", ["/pause", "/sleep", "/v1/load_lora_adapter"])
def test_web_pages_cannot_control_a_gateway_on_the_loopback(rl, rl_client, route):
    """Browsers send these without asking."""
    for headers in (
        {"origin": "http://evil.example"},
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded", "origin": "null"},
    ):
        answer = rl.post(route, headers=headers)
        assert answer.status_code == 415 and not engine(rl_client).paused


def test_the_openapi_document_has_the_routes(rl):
    paths = rl.get("/openapi.json").json()["paths"]
    assert {"/pause", "/v1/load_lora_adapter", "/inference/v1/generate"} <= set(paths)
    assert paths["/pause"]["post"]["requestBody"]["required"] is False
