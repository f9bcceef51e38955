"""/tokenize, /detokenize and /version, in vLLM's shapes."""

import dorad
import httpx
import pytest
from lib.gateway import running_gateway

WORDS = "naïve 日本 words"
CHAT = [{"role": "user", "content": "Grüße 🙂"}]


@pytest.mark.parametrize("model", [None, "dora", "lora@1"])
def test_a_prompt_becomes_the_tokens_that_a_completion_gets(http, grpc_client, text, model):
    body = {"model": model, "prompt": WORDS}
    answer = http.post("/tokenize", json=body).json()
    ids = text.encode(WORDS)
    assert answer == {
        "count": len(ids),
        "max_model_len": grpc_client.info().model.context_length,
        "tokens": ids,
        "token_strs": None,
    }
    plain = http.post("/tokenize", json={**body, "add_special_tokens": False}).json()
    assert plain["tokens"] == ids[1:] and plain["count"] == len(ids) - 1
    assert http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == ids[:1]


def test_a_chat_becomes_the_tokens_that_its_completion_gets(http, base, text):
    body = {"model": base, "messages": CHAT}
    ids = http.post("/tokenize", json=body).json()["tokens"]
    options = {"max_tokens": 1, "return_token_ids": True}
    answer = http.post("/v1/chat/completions", json={**body, **options}).json()
    assert ids == answer["prompt_token_ids"] == text.encode_chat(CHAT)
    pirate = {**body, "chat_template_kwargs": {"tone": "pirate"}, "add_special_tokens": True}
    ids = http.post("/tokenize", json=pirate).json()["tokens"]
    assert ids == [1, *text.encode_chat(CHAT, tone="pirate")]


def test_tokens_can_be_shown_as_the_vocabulary_has_them(http, text):
    answer = http.post("/tokenize", json={"prompt": "an é", "return_token_strs": True}).json()
    assert answer["token_strs"] == ["<s>", "an", "Ġ", "Ã", "©"]
    assert len(answer["tokens"]) == 5 and answer["tokens"][0] == 1


def test_a_long_text_comes_back_as_it_was(http, text):
    words = WORDS * 2000
    ids = http.post("/tokenize", json={"prompt": words}).json()["tokens"]
    assert ids == text.encode(words)
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "<s>" + words}


def test_token_ids_become_their_text(http):
    for tokens, words in (([1, 2], "<s></s>"), ([], ""), ([10**6], "")):
        assert http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": words}


@pytest.mark.parametrize(
    ("route", "fields", "code", "param"),
    [
        ("tokenize", {}, "FIELD_MISSING", "prompt"),
        ("tokenize", {"prompt": "x", "messages": CHAT}, "FIELD_MISSING", "prompt"),
        ("tokenize", {"prompt": [1]}, "FIELD_INVALID", "prompt"),
        ("tokenize", {"messages": [{"role": "user"}]}, "FIELD_MISSING", "messages[0].content"),
        ("tokenize", {"messages": CHAT, "chat_template": "x"}, "FIELD_UNSUPPORTED", None),
        ("tokenize", {"prompt": "x", "model": "nobody"}, "ADAPTER_NOT_FOUND", None),
        ("tokenize", {"prompt": "x", "max_tokens": 1}, "FIELD_UNKNOWN", "max_tokens"),
        ("detokenize", {}, "FIELD_MISSING", "tokens"),
        ("detokenize", {"tokens": [-1]}, "FIELD_INVALID", "tokens[0]"),
        ("detokenize", {"tokens": [1], "model": "nobody"}, "ADAPTER_NOT_FOUND", None),
    ],
)
def test_a_bad_request_is_refused_as_on_other_routes(http, route, fields, code, param):
    answer = http.post(f"/{route}", json=fields)
    error = answer.json()["error"]
    assert error["code"] == code and param in (None, error["param"])
    assert answer.status_code == (404 if code == "ADAPTER_NOT_FOUND" else 400)


def test_a_chat_that_the_template_refuses_is_the_callers_fault(http):
    body = {"messages": [{"role": "nobody", "content": "x"}]}
    answer = http.post("/tokenize", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "CHAT_TEMPLATE_REFUSED"


def test_without_a_tokenizer_there_is_only_a_version(server, tmp_path):
    with running_gateway(server.grpc, scratch=tmp_path) as running:
        for route, body in (("tokenize", {"prompt": "x"}), ("detokenize", {"tokens": [1]})):
            answer = httpx.post(f"{running.url}/{route}", json=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "TOKENIZER_NOT_CONFIGURED"
        assert httpx.get(f"{running.url}/version").json() == {"version": dorad.__version__}
