"""Routes beside those that generate: models, health and the OpenAPI document."""

import json

import openai
import pytest
from lib.gateway_clients import COMPLETION


def test_models_lists_the_base_and_active_adapters(client, base, grpc_client):
    rows = {row.id: row for row in client.models.list()}
    assert set(rows) == {base, "dora", "lora"}
    assert rows[base].parent is None and rows[base].root == base
    assert rows["dora"].parent == base and rows["dora"].root == "dora@1"
    assert rows["dora"].digest == grpc_client.adapter("dora").digest
    assert client.models.retrieve("dora@1").id == "dora@1"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_health_follows_the_server(fake, fake_http):
    assert fake_http.get("/health").status_code == 200
    fake.__exit__(None, None, None)
    answer = fake_http.get("/health")
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "SERVER_NOT_READY"
    answer = fake_http.post("/v1/completions", json=COMPLETION)
    assert answer.status_code == 503


def test_the_openapi_document_has_every_route(http):
    document = http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    for path, methods in document["paths"].items():
        for method in methods:
            route = path.replace("{model}", "dora").replace("{version}", "1")
            answer = http.request(method, route, json={})
            assert answer.status_code in (200, 400), (path, answer.text)
    text = json.dumps(document)
    for reference in ("CompletionRequest", "ChatRequest", "Error"):
        assert f"#/components/schemas/{reference}" in text
        assert reference in document["components"]["schemas"]


def test_unknown_routes_and_methods_answer_in_the_same_form(http):
    answer = http.get("/v1/nothing")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "ROUTE_NOT_FOUND")
    answer = http.get("/v1/completions")
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "METHOD_NOT_ALLOWED")


def test_without_rl_its_routes_are_unknown(http):
    routes = ("/v1/load_lora_adapter", "/pause", "/sleep", "/inference/v1/generate", "/server_info")
    for route in routes:
        answer = http.post(route, json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "ROUTE_NOT_FOUND")
