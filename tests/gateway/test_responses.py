"""Answers have the schemas that the OpenAPI document promises."""

import json

import pytest
from dorad.gateway import responses

TEXT = {"model": "dora", "prompt": "Hello", "max_tokens": 4, "seed": 1}
IDS = {"return_token_ids": True}
CHAT = {"model": "dora", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
TENSORS = {
    "inputs": [{"name": "input_ids", "datatype": "INT64", "shape": [2], "data": [5, 6]}],
    "parameters": {"max_tokens": 3},
}
ASKED = [
    ("POST", "/v1/completions", {**TEXT, **IDS, "n": 2, "logprobs": 2}),
    ("POST", "/v1/completions", {**TEXT, "echo": True, "max_tokens": 0, "logprobs": 1}),
    ("POST", "/v1/completions", {**TEXT, **IDS, **USAGE}),
    ("POST", "/v1/chat/completions", {**CHAT, **IDS, "logprobs": True, "top_logprobs": 2}),
    ("POST", "/v1/chat/completions", {**CHAT, **IDS, **USAGE}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/dora", None),
    ("POST", "/tokenize", {"prompt": "Hello", "return_token_strs": True}),
    ("POST", "/detokenize", {"tokens": [5, 6]}),
    ("GET", "/version", None),
    ("GET", "/v2", None),
    ("GET", "/v2/health/live", None),
    ("GET", "/v2/health/ready", None),
    ("GET", "/v2/models/dora", None),
    ("GET", "/v2/models/dora/ready", None),
    ("POST", "/v2/models/dora/infer", TENSORS),
    ("POST", "/v2/models/dora/generate", {"text_input": "Hi", "max_tokens": 3}),
    ("POST", "/v2/models/dora/generate_stream", {"text_input": "Hi", "max_tokens": 3}),
    ("POST", "/v2/repository/index", {}),
]


@pytest.mark.parametrize(("method", "route", "body"), ASKED)
def test_an_answer_has_its_schema(http, method, route, body):
    answer = http.request(method, route, json=body)
    assert answer.status_code == 200, answer.text
    document = http.get("/openapi.json").json()
    path = "/v1/models/{model}" if route == "/v1/models/dora" else route.replace("dora", "{model}")
    content = document["paths"][path][method.lower()]["responses"]["200"]["content"]
    schema = content[answer.headers["content-type"].partition(";")[0]]["schema"]
    model = getattr(responses, schema["$ref"].rpartition("/")[2])
    if answer.text.startswith("data: "):
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        values = [json.loads(line) for line in lines if line != "[DONE]"]
        assert values  # A slow reader may get all tokens in one event.
    else:
        values = [answer.json()]
    for value in values:
        model.model_validate(value)


def test_every_schema_belongs_to_an_answer_that_is_asked_for(http):
    document = http.get("/openapi.json").json()
    named = {
        (method.upper(), path.replace("{model}", "dora"))
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        for content in operation["responses"]["200"]["content"].values()
        if "$ref" in content["schema"] and "{version}" not in path
    }
    assert named == {(method, route) for method, route, _ in ASKED}
