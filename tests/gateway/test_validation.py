"""Bodies of requests: which fields a refusal names, and what counts as JSON."""

import pytest
from dorad.gateway.errors import Refusal
from dorad.gateway.oip_http import InferRequest
from dorad.gateway.requests import ChatRequest, CompletionRequest, checked
from dorad.gateway.validation import parse

COMPLETION = {"model": "m", "prompt": "x"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
TENSOR = {"name": "input_ids", "datatype": "INT64", "shape": [1], "data": [5]}


def problems(body, model):
    with pytest.raises(Refusal) as caught:
        checked(body, model)
    return [(v.field, v.reason) for v in caught.value.violations]


@pytest.mark.parametrize(
    ("fields", "path", "reason"),
    [
        ({"content": None}, "messages[0].content", "FIELD_MISSING"),
        ({"content": 3}, "messages[0].content", "FIELD_INVALID"),
        ({"content": ["x"]}, "messages[0].content[0]", "FIELD_INVALID"),
        ({"content": [{"type": "text"}]}, "messages[0].content[0].text", "FIELD_MISSING"),
        (
            {"content": [{"type": "image_url", "text": ""}]},
            "messages[0].content[0].image_url",
            "FIELD_MISSING",
        ),
        ({"role": None}, "messages[0].role", "FIELD_MISSING"),
    ],
)
def test_a_path_names_the_entry_of_a_list(fields, path, reason):
    body = {**CHAT, "messages": [{"role": "user", "content": "x", **fields}]}
    assert problems(body, ChatRequest) == [(path, reason)]


def test_only_the_first_bad_entry_of_a_list_is_named():
    body = {**COMPLETION, "prompt": [5, -1] * 1000, "stop": ["", ""], "stop_token_ids": ["a", "b"]}
    assert sorted(problems(body, CompletionRequest)) == [
        ("prompt[1]", "FIELD_INVALID"),
        ("stop[0]", "FIELD_INVALID"),
        ("stop_token_ids[0]", "FIELD_INVALID"),
    ]


def test_nothing_is_converted():
    body = {**COMPLETION, "n": 1.0, "seed": True, "temperature": "1", "echo": 1, "stream": "true"}
    assert len(problems(body, CompletionRequest)) == 5


def test_infinity_is_no_temperature():
    body = {**COMPLETION, **parse(b'{"temperature": 1e999}')}
    assert problems(body, CompletionRequest) == [("temperature", "FIELD_INVALID")]


def test_null_counts_as_absent():
    nulls = dict.fromkeys(("n", "stop", "max_tokens", "user", "tools", "logit_bias"))
    body = {**COMPLETION, **nulls, "stream_options": {"include_usage": None}}
    assert checked(body, CompletionRequest) == checked(COMPLETION, CompletionRequest)


def test_the_template_gets_all_fields_of_a_message():
    message = {"role": "user", "content": [{"type": "text", "text": "x", "a": 1}], "b": None}
    assert checked({**CHAT, "messages": [message]}, ChatRequest).messages == [message]


def call(**function):
    return {"id": "c1", "type": "function", "function": {"name": "f", **function}}


def calling(*calls, **fields):
    return {"role": "assistant", "tool_calls": list(calls), **fields}


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": "x"}])
def test_a_message_that_calls_tools_needs_no_content(content):
    message = calling(call(arguments={}), **content)
    assert checked({**CHAT, "messages": [message]}, ChatRequest).messages == [message]


@pytest.mark.parametrize(
    ("written", "meant"),
    [('{"a": [1, "é"]}', {"a": [1, "é"]}), ("", {}), ({"a": 1}, {"a": 1})],
)
def test_the_arguments_of_a_call_are_an_object(written, meant):
    message = calling(call(arguments=written))
    (found,) = checked({**CHAT, "messages": [message]}, ChatRequest).messages
    assert found["tool_calls"][0]["function"]["arguments"] == meant


@pytest.mark.parametrize(
    ("message", "path", "reason"),
    [
        (calling(call(arguments="{")), "tool_calls[0].function.arguments", "FIELD_INVALID"),
        (calling(call(arguments="[1]")), "tool_calls[0].function.arguments", "FIELD_INVALID"),
        (calling(call(arguments=5)), "tool_calls[0].function.arguments", "FIELD_INVALID"),
        (
            calling(call(arguments=r'"\ud83d"')),
            "tool_calls[0].function.arguments",
            "FIELD_INVALID",
        ),
        (calling(call(), {"function": {}}), "tool_calls[1].function.name", "FIELD_MISSING"),
        (calling({"id": "c1"}), "tool_calls[0].function", "FIELD_MISSING"),
        (calling({**call(), "type": "x"}), "tool_calls[0].type", "FIELD_INVALID"),
        (calling(call(), content=5), "content", "FIELD_INVALID"),
        ({**calling(call()), "role": "user"}, "role", "FIELD_INVALID"),
        ({**calling(), "content": None}, "content", "FIELD_MISSING"),
        ({"role": "tool", "tool_call_id": "c1"}, "content", "FIELD_MISSING"),
    ],
)
def test_a_bad_call_of_a_tool_is_named(message, path, reason):
    body = {**CHAT, "messages": [CHAT["messages"][0], message]}
    assert problems(body, ChatRequest) == [(f"messages[1].{path}", reason)]


def test_unknown_fields_of_tensors_are_taken():
    parameters = {"binary_data_size": 8, "other": 1}
    body = {"inputs": [{**TENSOR, "parameters": parameters, "other": 1}]}
    assert checked(body, InferRequest).inputs[0].parameters.binary_data_size == 8
    assert problems({**body, "other": 1}, InferRequest) == [("other", "FIELD_UNKNOWN")]


def test_a_byte_order_mark_is_skipped():
    assert parse('\ufeff{"a": "é"}'.encode()) == {"a": "é"}
