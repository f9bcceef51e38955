"""Fields that are not served: taken with a value that asks for nothing, else refused by name."""

import pytest

NOTHING = {
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "length_penalty": 1,
    "use_beam_search": False,
    "top_k": -1,
    "seed": None,
    "user": "me",
    "bad_words": [],
    "logits_processors": [],
    "allowed_token_ids": None,
    "detokenize": True,
    "spaces_between_special_tokens": True,
    "add_generation_prompt": True,
    "echo": False,
    "best_of": 1,
    "response_format": {"type": "text"},
    "stream_options": {"include_obfuscation": False, "continuous_usage_stats": False},
}
NOTHING_OF_CHATS = {
    "add_special_tokens": False,
    "continue_final_message": False,
    "documents": [],
    "tools": [],
    "tool_choice": "auto",
    "include_reasoning": True,
    "modalities": ["text"],
    "mm_processor_kwargs": {},
}


def test_fields_that_ask_for_nothing_are_taken(http, base):
    body = {"model": base, "prompt": "x", "max_tokens": 1, **NOTHING}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    chat = {"messages": [{"role": "user", "content": "x"}], **NOTHING, **NOTHING_OF_CHATS}
    answer = http.post("/v1/chat/completions", json={"model": base, "max_tokens": 1, **chat})
    assert answer.status_code == 200, answer.text
    nothing = {k: v for k, v in NOTHING.items() if k not in ("user", "stream_options")}
    body = {"input_ids": [5], "max_tokens": 1, "parameters": nothing}
    answer = http.post(f"/v2/models/{base}/generate", json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "fields",
    [
        {"detokenize": False},
        {"detokenize": 1},
        {"spaces_between_special_tokens": False},
        {"length_penalty": 1.1},
        {"length_penalty": True},
        {"use_beam_search": 0},
        {"guided_json": {}},
        {"stream_options": {"continuous_usage_stats": True}},
    ],
)
def test_what_is_not_served_is_refused_by_its_name(http, base, fields):
    ((name, value),) = fields.items()
    path = f"{name}.{next(iter(value))}" if name == "stream_options" else name
    for route, prompt in (
        ("completions", {"prompt": "x"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        answer = http.post(f"/v1/{route}", json={"model": base, **prompt, **fields})
        assert answer.status_code == 400
        (violation,) = answer.json()["error"]["violations"]
        assert (violation["field"], violation["reason"]) == (path, "FIELD_UNSUPPORTED")


def test_a_field_of_one_route_is_refused_by_its_name_on_another(http, base):
    chat = {"model": base, "messages": [{"role": "user", "content": "x"}]}
    for fields in ({"echo": True}, {"add_special_tokens": True}, {"continue_final_message": True}):
        answer = http.post("/v1/chat/completions", json={**chat, **fields})
        assert answer.json()["error"]["code"] == "FIELD_UNSUPPORTED"
        assert answer.json()["error"]["param"] in fields
    parameters = {"length_penalty": 2}
    answer = http.post(
        f"/v2/models/{base}/generate", json={"input_ids": [5], "parameters": parameters}
    )
    assert answer.json()["error"] == "FIELD_UNSUPPORTED: length_penalty: is not supported"
