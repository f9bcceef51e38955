"""One line of the log for each call, and the ids by which callers find it."""

import json
import signal

import grpc
import pytest
from dorad.v1 import adapters_pb2, control_pb2, inference_pb2
from lib.server import Server, serve, wait_until
from lib.wire import failure, generate_request, pack_ids

PROMPT = [11, 12, 13, 14, 15]
TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def server(zoo):
    with serve(zoo.model("slow"), {"a": zoo.adapter("slow", "dora")}) as running:
        yield running


def records(server: Server) -> list[dict]:
    """Every line of the log, whatever ends a line to whomever; each must be one JSON object."""
    return [json.loads(line) for line in server.log().splitlines()]


def lines_of(server: Server, request_id: str) -> list[dict]:
    return [
        record
        for record in records(server)
        if record["msg"] == "request ended" and record["request_id"] == request_id
    ]


def line_of(server: Server, request_id: str) -> dict:
    wait_until(lambda: lines_of(server, request_id), what="the call's line")
    (line,) = lines_of(server, request_id)
    return line


def generate(server: Server, *metadata: tuple[str, str], **options):
    """The finished call: its messages, and its code and trailers."""
    call = server.wire.inference.Generate(
        generate_request(PROMPT, **options), timeout=60, metadata=metadata
    )
    return list(call), call


def trailer(call, key: str = "x-request-id") -> str:
    return dict(call.trailing_metadata())[key]


def test_a_generation_is_told_in_one_line(server: Server) -> None:
    messages, call = generate(
        server,
        ("traceparent", TRACEPARENT),
        adapter="a",
        n=2,
        max_tokens=6,
        ignore_eos=True,
        request_id="told-once",
    )
    assert trailer(call) == "told-once" == messages[0].request_id
    line = line_of(server, "told-once")
    usage = messages[0].finish.usage
    assert line["level"] == "info"
    assert line["method"] == "Generate" and line["code"] == "OK" and "reason" not in line
    assert (line["adapter"], line["adapter_version"]) == ("a", 1)
    assert line["trace_id"] == TRACE
    assert line["peer"].startswith("ipv4:127.0.0.1:")
    assert line["samples"] == 2 and line["finish"] == "length"
    assert line["prompt_tokens"] == usage.prompt_tokens == len(PROMPT)
    assert line["generated_tokens"] == 12
    assert line["cached_tokens"] >= usage.cached_prompt_tokens
    assert 0 <= line["queue_seconds"] <= line["ttft_seconds"] <= line["total_seconds"]


def test_a_refusal_says_why(server: Server) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        generate(server, ("x-request-id", "refused-1"), adapter="missing", max_tokens=1)
    assert failure(caught.value).metadata["request_id"] == "refused-1"
    line = line_of(server, "refused-1")
    assert line["code"] == "NOT_FOUND" and line["reason"] == "ADAPTER_NOT_FOUND"
    assert line["adapter"] == "missing" and "generated_tokens" not in line


def test_a_cancelled_call_has_its_line_when_the_engine_has_let_go(server: Server) -> None:
    call = server.wire.stream(PROMPT, max_tokens=2000, ignore_eos=True, request_id="cancelled-1")
    next(call)
    call.cancel()
    line = line_of(server, "cancelled-1")
    assert line["code"] == "CANCELLED" and line["reason"] == "CLIENT_CANCELLED"
    assert line["generated_tokens"] >= 1


def test_a_score_is_told(server: Server) -> None:
    request = inference_pb2.ScoreRequest(
        sequences=[inference_pb2.TokenSequence(token_ids=pack_ids(PROMPT))],
        adapters=["a@1"],
        request_id="score-1",
    )
    _, call = server.wire.inference.Score.with_call(request, timeout=60)
    assert trailer(call) == "score-1"
    line = line_of(server, "score-1")
    assert line["method"] == "Score" and (line["adapter"], line["adapter_version"]) == ("a", 1)


def test_every_call_answers_with_an_id(server: Server, zoo) -> None:
    _, first = server.wire.control.GetInfo.with_call(control_pb2.GetInfoRequest(), timeout=10)
    _, second = server.wire.control.GetInfo.with_call(control_pb2.GetInfoRequest(), timeout=10)
    assert trailer(first) != trailer(second)
    assert line_of(server, trailer(second))["method"] == "GetInfo"
    watch = server.wire.adapters.Watch(
        adapters_pb2.WatchRequest(from_generation=1 << 40), timeout=10
    )
    with pytest.raises(grpc.RpcError):
        next(watch)
    assert line_of(server, trailer(watch))["reason"] == "GENERATION_UNKNOWN"
    server.wire.publish("told", zoo.adapter("slow", "lora"))
    (line,) = [r for r in records(server) if r.get("method") == "Publish"]
    assert (line["adapter"], line["adapter_version"], line["code"]) == ("told", 1, "OK")


def test_the_callers_id_is_taken_where_the_message_has_none(server: Server) -> None:
    messages, call = generate(server, ("x-request-id", "from.the_proxy-7"), max_tokens=1)
    assert trailer(call) == messages[0].request_id == "from.the_proxy-7"
    messages, call = generate(server, ("x-request-id", "outer"), max_tokens=1, request_id="inner")
    assert trailer(call) == messages[0].request_id == "inner"


@pytest.mark.parametrize(
    "bad", ["two words", 'q"uote', "sl/ash", "a" * 129, "", "semi;colon", "{}"]
)
def test_other_ids_are_replaced(server: Server, bad: str) -> None:
    _, call = generate(server, ("x-request-id", bad), max_tokens=1)
    assert trailer(call).startswith("r-")


def test_two_ids_are_none(server: Server) -> None:
    _, call = generate(server, ("x-request-id", "one"), ("x-request-id", "two"), max_tokens=1)
    assert trailer(call).startswith("r-")


@pytest.mark.parametrize(
    "bad",
    [
        "",
        TRACEPARENT.upper(),
        TRACEPARENT + "-00",
        f"ff{TRACEPARENT[2:]}",
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f'00-{TRACE[:-1]}"-b7ad6b7169203331-01',
    ],
)
def test_malformed_traces_are_ignored(server: Server, bad: str) -> None:
    _, call = generate(server, ("traceparent", bad), max_tokens=1)
    assert "trace_id" not in line_of(server, trailer(call))


@pytest.mark.parametrize(
    "text", ['"', "\\", '","level":"error', "\n", "\r\n{}", "\x1b[31m", "\x00", "\u2028", "\u0085"]
)
def test_nothing_that_a_caller_says_leaves_its_field(server: Server, text: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        generate(server, max_tokens=1, request_id=f"x{text}y", adapter=f"x{text}y")
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    request_id = failure(caught.value).metadata["request_id"]
    line = line_of(server, request_id)
    assert line["level"] == "info" and "adapter" not in line


def test_quotes_in_an_id_stay_in_it(server: Server) -> None:
    """Printable characters are an id, also those that mean something to JSON."""
    odd = 'a"b\\c{},:'
    messages, call = generate(server, max_tokens=1, request_id=odd)
    assert trailer(call) == messages[0].request_id == odd
    assert line_of(server, odd)["code"] == "OK"


def test_prompts_are_not_logged(zoo) -> None:
    with serve(zoo.model("llama2"), None, {"log.level": "debug"}) as server:
        server.wire.generate([101, 102, 103], max_tokens=3, salt="a-secret-salt")
        text = server.log()
    assert "a-secret-salt" not in text
    assert "101, 102" not in text and "[101" not in text


def test_requests_lines_can_be_turned_off(zoo) -> None:
    with serve(zoo.model("llama2"), None, {"log.requests": False}) as server:
        server.wire.generate(PROMPT, max_tokens=1)
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(20)
        messages = {record["msg"] for record in records(server)}
    assert "request ended" not in messages and "shut down" in messages
