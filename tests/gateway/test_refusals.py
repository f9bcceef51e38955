"""Requests that are refused, and what their answers name."""

import openai
import pytest


def test_an_unknown_adapter_is_404_with_the_servers_reason(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="dorra", prompt="x")
    assert caught.value.code == "ADAPTER_NOT_FOUND" and caught.value.type == "not_found_error"


def test_every_violation_of_the_server_is_listed(client, base):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=base, prompt="x", temperature=-1, top_p=3)
    assert caught.value.code == "TEMPERATURE_OUT_OF_RANGE" and caught.value.param == "temperature"
    reasons = [v["reason"] for v in caught.value.body["violations"]]
    assert reasons == ["TEMPERATURE_OUT_OF_RANGE", "TOP_P_OUT_OF_RANGE"]


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt": None}, "FIELD_MISSING", "prompt"),
        ({"prompt": []}, "FIELD_INVALID", "prompt"),
        ({"prompt": [1, -5]}, "FIELD_INVALID", "prompt[1]"),
        ({"prompt": [[1], ["x"]]}, "FIELD_INVALID", "prompt[1][0]"),
        ({"prompt": ["a", 1]}, "FIELD_INVALID", "prompt[1]"),
        ({"prompt": {}}, "FIELD_INVALID", "prompt"),
        ({"model": None}, "FIELD_MISSING", "model"),
        ({"model": ""}, "MODEL_NOT_FOUND", "model"),
        ({"n": 0}, "FIELD_INVALID", "n"),
        ({"n": True}, "FIELD_INVALID", "n"),
        ({"n": 2**40}, "FIELD_INVALID", "n"),
        ({"n": 1000}, "CHOICES_TOO_MANY", "n"),
        ({"prompt": ["x"] * 129}, "CHOICES_TOO_MANY", "n"),
        ({"max_tokens": "4"}, "FIELD_INVALID", "max_tokens"),
        ({"max_tokens": 0}, "MAX_TOKENS_OUT_OF_RANGE", "max_tokens"),
        ({"seed": -1}, "FIELD_INVALID", "seed"),
        ({"stop": ""}, "FIELD_INVALID", "stop"),
        ({"stop": ["x"] * 17}, "FIELD_INVALID", "stop"),
        ({"stop": "x" * 257}, "FIELD_INVALID", "stop"),
        ({"temperature": "hot"}, "FIELD_INVALID", "temperature"),
        ({"temperature": 10**400}, "FIELD_INVALID", "temperature"),
        ({"length_penalty": 0.5}, "FIELD_UNSUPPORTED", "length_penalty"),
        ({"presence_penalty": False}, "FIELD_INVALID", "presence_penalty"),
        ({"presence_penalty": 2.5}, "PENALTY_OUT_OF_RANGE", "presence_penalty"),
        ({"repetition_penalty": 0}, "PENALTY_OUT_OF_RANGE", "repetition_penalty"),
        ({"logit_bias": {"5": 101}}, "LOGIT_BIAS_INVALID", "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "TOKEN_ID_OUT_OF_RANGE", "logit_bias"),
        ({"allowed_token_ids": []}, "FIELD_INVALID", "allowed_token_ids"),
        ({"bad_words": [""]}, "FIELD_INVALID", "bad_words[0]"),
        ({"bad_words_token_ids": [[5], []]}, "FIELD_INVALID", "bad_words_token_ids[1]"),
        ({"best_of": 3}, "FIELD_UNSUPPORTED", "best_of"),
        ({"temprature": 1}, "FIELD_UNKNOWN", "temprature"),
        ({"stream_options": {"usage": True}}, "FIELD_UNKNOWN", "stream_options.usage"),
    ],
)
def test_a_bad_field_is_400_and_named(http, base, fields, code, param):
    answer = http.post("/v1/completions", json={"model": base, "prompt": "x", **fields})
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param), error
    assert answer.status_code == (404 if code == "MODEL_NOT_FOUND" else 400)


def test_problems_of_fields_are_listed_whatever_their_kind(http, base):
    fields = {"model": base, "length_penalty": 2, "temprature": 1, "stop": ["x", ""]}
    error = http.post("/v1/completions", json=fields).json()["error"]
    assert {v["field"]: v["reason"] for v in error["violations"]} == {
        "length_penalty": "FIELD_UNSUPPORTED",
        "prompt": "FIELD_MISSING",
        "temprature": "FIELD_UNKNOWN",
        "stop[1]": "FIELD_INVALID",
    }
    assert (error["code"], error["param"]) == ("FIELD_UNSUPPORTED", "length_penalty")


def test_too_many_logprobs_are_not_a_matter_of_top_k(http, base):
    body = {"model": base, "prompt": "x", "logprobs": 999, "top_k": 5}
    error = http.post("/v1/completions", json=body).json()["error"]
    assert (error["code"], error["param"]) == ("LOGPROBS_K_OUT_OF_RANGE", "logprobs")
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 999}
    error = http.post("/v1/chat/completions", json={"model": base, **chat}).json()["error"]
    assert (error["code"], error["param"]) == ("LOGPROBS_K_OUT_OF_RANGE", "top_logprobs")


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]},
        {"messages": "hi"},
        {"tools": [{"type": "function"}]},
        {"response_format": {"type": "json_object"}},
        {"top_logprobs": 3},
    ],
)
def test_a_bad_chat_is_400(http, base, fields):
    body = {"model": base, "messages": [{"role": "user", "content": "x"}], **fields}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["code"]


@pytest.mark.parametrize(
    ("content", "kind", "status", "code"),
    [
        (b"{", "application/json", 400, "BODY_NOT_JSON"),
        (b"[1]", "application/json", 400, "BODY_NOT_JSON"),
        (b'{"temperature": NaN}', "application/json", 400, "BODY_NOT_JSON"),
        (b"[" * 100_000, "application/json", 400, "BODY_NOT_JSON"),
        (b'{"n": ' + b"9" * 5000 + b"}", "application/json", 400, "BODY_NOT_JSON"),
        (b"\xff\xfe", "application/json", 400, "BODY_NOT_JSON"),
        (b'{"prompt": "\xed\xa0\xbd"}', "application/json", 400, "BODY_NOT_JSON"),
        (b"{}", "text/plain", 415, "CONTENT_TYPE_NOT_JSON"),
        (b" " * ((4 << 20) + 1), "application/json", 413, "BODY_TOO_LARGE"),
    ],
)
def test_a_bad_body_is_refused(http, content, kind, status, code):
    answer = http.post("/v1/completions", content=content, headers={"content-type": kind})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", r'{"model": "m", "prompt": "hi \ud83d"}'),
        ("/v1/completions", r'{"model": "m\uDE42", "prompt": "hi"}'),
        ("/v1/completions", r'{"model": "m", "prompt": "hi", "a\ud83d": 1}'),
        ("/v1/completions", r'{"model": "m", "prompt": "hi", "cache_salt": "\ud83d"}'),
        ("/v1/chat/completions", r'{"messages": [{"role": "user", "content": "\ud83d"}]}'),
        ("/v2/models/m/generate", r'{"text_input": "\ud83d"}'),
        ("/v2/models/m/infer", r'{"inputs": [{"name": "text_input", "data": ["\ud83d"]}]}'),
    ],
)
def test_half_a_surrogate_pair_is_no_text(http, route, body):
    answer = http.post(route, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and "BODY_NOT_JSON" in str(answer.json()["error"])


def test_characters_may_be_written_as_surrogate_pairs(http, base, text):
    body = rf'{{"model": "{base}", "prompt": "\ud83d\ude42", "max_tokens": 0, "echo": true}}'
    answer = http.post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert answer.json()["choices"][0]["text"] == "\N{SLIGHTLY SMILING FACE}"
