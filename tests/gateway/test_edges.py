"""Refusals, what is passed on, clients that go away, and the other routes."""

import contextlib
import json
import socket
import ssl
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from lib.gateway import CLOCK_STEP, command, running_gateway
from lib.server import environment, wait_until
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.grpc import service_pb2 as pb  # A process can have only these or the gateway's.
from tritonclient.grpc import service_pb2_grpc as pb_grpc

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "client"))

from fake_server import FakeServer, overloaded

COMPLETION = {"model": "fake-model", "prompt": [5, 6], "max_tokens": 4}


@pytest.fixture
def fake():
    with FakeServer() as server:
        yield server


@pytest.fixture
def fake_gateway(fake, folder, tmp_path):
    with running_gateway(
        fake.target, "--tokenizer", folder, "--max-requests", 3, "--drain", 5, scratch=tmp_path
    ) as running:
        yield running


@pytest.fixture
def fake_http(fake_gateway):
    with httpx.Client(base_url=fake_gateway.url, timeout=20) as it:
        yield it


# --- Refusals -------------------------------------------------------------------------------------


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
        ({"presence_penalty": 0.5}, "FIELD_UNSUPPORTED", "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "FIELD_UNSUPPORTED", "logit_bias"),
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
    fields = {"model": base, "presence_penalty": 1, "temprature": 1, "stop": ["x", ""]}
    error = http.post("/v1/completions", json=fields).json()["error"]
    assert {v["field"]: v["reason"] for v in error["violations"]} == {
        "presence_penalty": "FIELD_UNSUPPORTED",
        "prompt": "FIELD_MISSING",
        "temprature": "FIELD_UNKNOWN",
        "stop[1]": "FIELD_INVALID",
    }
    assert (error["code"], error["param"]) == ("FIELD_UNSUPPORTED", "presence_penalty")


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


def test_fields_that_ask_for_nothing_are_taken(http, base):
    body = {"model": base, "prompt": "x", "max_tokens": 1, "logit_bias": {}, "user": "me"}
    body |= {"presence_penalty": 0, "frequency_penalty": 0.0, "top_k": -1, "seed": None}
    assert http.post("/v1/completions", json=body).status_code == 200


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


def test_unknown_routes_and_methods_answer_in_the_same_form(http):
    answer = http.get("/v1/nothing")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "ROUTE_NOT_FOUND")
    answer = http.get("/v1/completions")
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "METHOD_NOT_ALLOWED")


def test_a_full_queue_is_429_with_the_servers_hint(fake, fake_http):
    fake.refuse_generate = [overloaded(1.5)]
    answer = fake_http.post("/v1/completions", json=COMPLETION)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "QUEUE_FULL")
    assert answer.headers["retry-after"] == "2" and answer.headers["retry-after-ms"] == "1500"
    assert len(fake.generate_calls) == 1  # The gateway itself does not try again.


def test_all_who_call_while_the_server_hangs_wait_one_timeout(fake, folder, tmp_path):
    fake.hang_info = True
    with running_gateway(fake.target, "--tokenizer", folder, scratch=tmp_path) as running:

        def call(_):
            url = f"{running.url}/v1/completions"
            return httpx.post(url, json=COMPLETION, timeout=60).status_code

        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(call, range(6))) == [504] * 6
    # One at the start and one for all; another should a caller come late. One for each would be 7.
    assert 2 <= [method for method, _ in fake.routing.seen].count("GetInfo") <= 3


def test_a_failure_before_the_first_token_has_its_status_when_streaming(fake, fake_http):
    fake.refuse_generate = [overloaded(1.5)]
    answer = fake_http.post("/v1/completions", json={**COMPLETION, "stream": True})
    assert answer.status_code == 429 and answer.json()["error"]["code"] == "QUEUE_FULL"


def test_a_failure_after_the_first_token_is_the_streams_last_event(fake, fake_gateway):
    fake.break_after = 2
    with (
        openai.OpenAI(base_url=f"{fake_gateway.url}/v1", api_key="x", max_retries=0) as client,
        pytest.raises(openai.APIError, match="connection lost"),
    ):
        for _ in client.completions.create(**COMPLETION, stream=True):
            pass


def test_more_requests_than_places_are_429(fake, fake_gateway, fake_http):
    fake.endless = True
    with openai.OpenAI(base_url=f"{fake_gateway.url}/v1", api_key="x", max_retries=0) as client:
        streams = [client.completions.create(**COMPLETION, stream=True) for _ in range(3)]
        answer = fake_http.post("/v1/completions", json=COMPLETION)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "GATEWAY_BUSY")
        assert fake_http.get("/health").status_code == 200
        for stream in streams:
            stream.close()
    wait_until(lambda: fake.running == 0, what="the streams have ended")
    fake.endless = False
    assert fake_http.post("/v1/completions", json=COMPLETION).status_code == 200


def test_tokens_are_sent_as_they_come(fake, fake_http):
    fake.endless = True
    body = {**COMPLETION, "stream": True}
    with fake_http.stream("POST", "/v1/completions", json=body) as answer:
        lines = filter(None, answer.iter_lines())
        for _ in range(4):  # An answer that came as a whole would never come.
            assert json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"]
        assert fake.running == 1


def test_a_long_echo_is_whole_and_others_are_served(fake, fake_http, text):
    """That they need not wait for it: test_turns.py."""
    half = next(i for i in range(300) if text.token_bytes(i) == b"\x80")  # Never a character.
    body = {**COMPLETION, "prompt": [[half] * 20_000] * 8, "echo": True, "max_tokens": 0}
    with ThreadPoolExecutor(1) as pool:
        echo = pool.submit(fake_http.post, "/v1/completions", json=body, timeout=90)
        while not echo.done():
            assert fake_http.get("/health", timeout=90).status_code == 200
    answer = echo.result()
    assert answer.status_code == 200, answer.text
    shown = {choice["text"] for choice in answer.json()["choices"]}
    assert shown == {"\N{REPLACEMENT CHARACTER}" * 20_000}


@pytest.mark.parametrize("prompts", [1, 64])
def test_many_long_choices_are_whole_and_others_are_served(fake_http, prompts):
    """That they need not wait for them: test_turns.py."""
    body = {**COMPLETION, "prompt": [[5, 6]] * prompts, "n": 64 // prompts, "max_tokens": 250}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(
            fake_http.post, "/v1/completions", json={**body, "logprobs": 20}, timeout=90
        )
        while not answer.done():
            assert fake_http.get("/health", timeout=90).status_code == 200
    choices = answer.result().json()["choices"]
    assert [len(choice["logprobs"]["top_logprobs"]) for choice in choices] == [250] * 64


# --- What is passed on ----------------------------------------------------------------------------


def test_each_request_carries_its_own_token_id_and_trace(fake, fake_http):
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for token, request_id in (("one", "id-1"), ("two", "id-2"), (None, "bad id!")):
        headers = {"x-request-id": request_id, "traceparent": trace if token else "nonsense"}
        headers |= {"authorization": f"Bearer {token}"} if token else {}
        answer = fake_http.post("/v1/completions", json=COMPLETION, headers=headers)
        assert answer.status_code == 200
        seen = fake.metadata[-1]
        assert seen.get("authorization") == (f"Bearer {token}" if token else None)
        assert seen.get("traceparent") == (trace if token else None)
        assert answer.headers["x-request-id"] == seen["x-request-id"]
        assert (seen["x-request-id"] == request_id) == (token is not None)
        assert fake.generate_calls[-1].request_id.startswith(seen["x-request-id"])
    ids = [call.request_id for call in fake.generate_calls]
    assert len(set(ids)) == 3


def test_the_gateways_own_token_is_never_lent_to_a_caller(fake, folder, tmp_path):
    with running_gateway(
        fake.target, "--tokenizer", folder, scratch=tmp_path, DORAD_TOKEN="own-secret"
    ) as running:
        assert httpx.post(f"{running.url}/v1/completions", json=COMPLETION).status_code == 200
    assert "authorization" not in fake.metadata[-1]


# --- Clients that go away -------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_goes_away_cancels_on_the_server(fake, fake_gateway, streamed):
    fake.endless, fake.token_delay = True, 0.005
    body = {**COMPLETION, "max_tokens": 1000, "stream": streamed, "stop": "no such text"}
    with httpx.Client(base_url=fake_gateway.url, timeout=20) as client:
        if streamed:
            with client.stream("POST", "/v1/completions", json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=body, timeout=1.0)
    wait_until(lambda: fake.cancelled == 1 and fake.running == 0, what="the call was cancelled")


@contextlib.contextmanager
def stuck_readers(running, count):
    """Streams whose readers take nothing."""
    host, _, port = running.http.rpartition(":")
    long = {"prompt": [40] * 30_000, "n": 128, "return_token_ids": True}  # More than buffers take.
    body = json.dumps({**COMPLETION, **long, "stream": True})
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            reader = stack.enter_context(socket.socket())
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect((host, int(port)))
            reader.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        yield


def test_a_reader_that_stops_reading_gives_its_place_back(fake, folder, tmp_path):
    fake.endless = True
    arguments = ["--tokenizer", folder, "--max-requests", 1, "--timeout", 6, "--drain", 2]
    with (
        running_gateway(fake.target, *arguments, scratch=tmp_path) as running,
        stuck_readers(running, 1),
    ):
        models = f"{running.url}/v1/models"
        wait_until(lambda: httpx.get(models).status_code == 429, what="no place is free")
        wait_until(lambda: httpx.get(models).status_code == 200, 30, "the place is free again")


def test_a_grpc_reader_that_stops_reading_gives_its_place_back(fake, folder, tmp_path):
    fake.endless = True
    arguments = ["--tokenizer", folder, "--grpc-listen", "127.0.0.1:0", "--max-requests", 1]
    arguments += ["--timeout", 6, "--drain", 2]
    with (
        running_gateway(fake.target, *arguments, scratch=tmp_path) as running,
        grpc_stream(running) as call,
    ):
        models = f"{running.url}/v1/models"
        assert httpx.get(models).status_code == 429
        wait_until(lambda: httpx.get(models).status_code == 200, 30, "the place is free again")
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "STREAM_NOT_READ" in caught.value.details()


def test_the_gateway_ends_in_peace_beside_a_reader_that_stops_reading(fake, fake_gateway):
    fake.endless = True
    with stuck_readers(fake_gateway, 1):
        wait_until(lambda: fake.running == 1, what="the stream has begun")
        time.sleep(1)  # Its buffers are full.
        fake_gateway.process.terminate()
        assert fake_gateway.process.wait(30) == 0  # The fixture looks at the log.


def test_a_met_stop_string_ends_the_call_on_the_server(fake, fake_http, text):
    fake.endless = True
    body = {**COMPLETION, "prompt": [40], "max_tokens": 1000, "stop": text.decode([45])}
    answer = fake_http.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["text"] == text.decode([40, 41, 42, 43, 44])
    wait_until(lambda: fake.cancelled == 1 and fake.running == 0, what="the call was cancelled")


def test_real_pages_and_leases_come_back_after_disconnects(gateway, server, grpc_client):
    for _ in range(10):
        with (
            httpx.Client(base_url=gateway.url, timeout=20) as client,
            client.stream(
                "POST",
                "/v1/completions",
                json={"model": "dora", "prompt": "x", "max_tokens": 150, "stream": True, "n": 8},
            ) as answer,
        ):
            next(answer.iter_lines())
    wait_until(lambda: grpc_client.info().engine.running_sequences == 0, what="all requests ended")
    wait_until(lambda: grpc_client.info().engine.adapter_leases == 0, what="all leases ended")


def test_requests_in_flight_finish_at_sigterm(fake, folder, tmp_path):
    fake.token_delay = 0.1
    with running_gateway(fake.target, "--tokenizer", folder, scratch=tmp_path) as running:
        body = {**COMPLETION, "max_tokens": 10, "stream": True}
        with (
            httpx.Client(base_url=running.url, timeout=20) as client,
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            lines = answer.iter_lines()
            next(lines)
            running.process.terminate()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert running.process.wait(20) == 0


@pytest.fixture
def both_doors(fake, folder, tmp_path):
    """A gateway with a gRPC door, and streams that do not end by themselves.

    Its time to finish is more than one step of its clock, and less than two.
    """
    fake.endless, fake.token_delay = True, 0.02
    arguments = ["--tokenizer", folder, "--grpc-listen", "127.0.0.1:0"]
    arguments += ["--drain", 1.5 * CLOCK_STEP, "--timeout", 100 * CLOCK_STEP]
    with running_gateway(fake.target, *arguments, scratch=tmp_path, stepped_clock=True) as running:
        yield running


@contextlib.contextmanager
def http_stream(gateway):
    """Its lines; the first one has come."""
    body = {**COMPLETION, "stream": True}
    with (
        httpx.Client(base_url=gateway.url, timeout=20) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        yield lines


@contextlib.contextmanager
def grpc_stream(gateway):
    """Its messages; the first one has come, and few are kept for who does not read."""
    request = pb.ModelInferRequest(model_name="fake-model")
    request.inputs.add(name="input_ids", datatype="INT64", shape=[1])
    request.inputs[0].contents.int64_contents.append(5)
    small = [("grpc.http2.lookahead_bytes", 4096), ("grpc.http2.bdp_probe", 0)]
    with grpc.insecure_channel(gateway.grpc, options=small) as channel:
        stub = pb_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(iter([request]), timeout=60)
        next(call)
        yield call


def grpc_code(channel):
    """How a new call ends."""
    try:
        stub = pb_grpc.GRPCInferenceServiceStub(channel)
        stub.ServerLive(pb.ServerLiveRequest(), timeout=5)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def ends_its_doors(gateway):
    """SIGTERM, until gRPC takes no calls any more."""
    with grpc.insecure_channel(gateway.grpc) as channel:
        assert grpc_code(channel) is grpc.StatusCode.OK
        gateway.process.terminate()
        gone = grpc.StatusCode.UNAVAILABLE
        wait_until(lambda: grpc_code(channel) is gone, 20, "gRPC takes no calls")


def test_no_door_takes_requests_while_one_finishes_its_own(both_doors):
    with http_stream(both_doors) as lines:
        ends_its_doors(both_doors)
        with grpc.insecure_channel(both_doors.grpc) as another:
            assert grpc_code(another) is grpc.StatusCode.UNAVAILABLE
        assert next(lines) is not None and both_doors.process.poll() is None


def test_the_time_to_finish_is_that_of_all_doors_together(both_doors):
    with grpc_stream(both_doors) as messages:
        with http_stream(both_doors) as lines:
            ends_its_doors(both_doors)
            both_doors.step_clock()
            # Both go on: the time is not over.
            for _ in range(10):
                assert next(lines) is not None and next(messages)
        # HTTP has ended. gRPC's time runs from the signal on; from here on, a step would not do.
        assert next(messages) and both_doors.process.poll() is None
        both_doors.step_clock()
        assert both_doors.process.wait(30) == 0


def test_a_second_signal_ends_requests_in_flight_over_grpc(both_doors):
    with grpc_stream(both_doors) as messages:
        ends_its_doors(both_doors)
        assert next(messages) and both_doors.process.poll() is None
        both_doors.process.terminate()
        assert both_doors.process.wait(30) == 0  # The drain takes 600 s.


# --- The other routes -----------------------------------------------------------------------------


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


def samples_of(http):
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(http.get("/metrics").text)
        for s in family.samples
    }


def test_metrics_count_requests_and_tokens(fake_http):
    assert fake_http.post("/v1/completions", json=COMPLETION).status_code == 200
    fake_http.post("/v1/completions", json={})
    samples = samples_of(fake_http)
    for code in ("200", "400"):
        key = ("dorad_gateway_requests_total", (("code", code), ("endpoint", "completions")))
        assert samples[key] == 1
    assert samples["dorad_gateway_tokens_total", (("kind", "completion"),)] == 4
    assert samples["dorad_gateway_requests_in_flight", ()] == 0


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", {**COMPLETION, "stream": True}),
        (
            "/v1/chat/completions",
            {"model": "fake-model", "messages": [{"role": "user", "content": "x"}], "stream": True},
        ),
        ("/v2/models/fake-model/generate_stream", {"input_ids": [5, 6], "max_tokens": 4}),
    ],
)
def test_metrics_count_no_tokens_of_a_refused_stream(fake, fake_http, route, body):
    prompt = ("dorad_gateway_tokens_total", (("kind", "prompt"),))
    fake.refuse_generate = [overloaded(None)]
    assert fake_http.post(route, json=body).status_code == 429
    assert samples_of(fake_http).get(prompt, 0) == 0
    assert fake_http.post(route, json=body).status_code == 200
    sent = fake.generate_calls[-1].prompt_token_ids
    assert samples_of(fake_http)[prompt] == len(sent) // 4


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


@pytest.mark.parametrize(
    "arguments",
    [
        ["--listen", "0.0.0.0:0"],
        ["--listen", "nowhere"],
        ["--tls-cert", "a.pem"],
        ["--tokenizer", "/nonexistent"],
    ],
)
def test_a_bad_command_line_is_a_usage_error(arguments):
    run = subprocess.run(
        command("127.0.0.1:1", *arguments), capture_output=True, text=True, env=environment(),
        timeout=60,
    )  # fmt: skip
    assert run.returncode == 64 and run.stderr.startswith("doractl: "), run.stderr


def test_a_slow_body_does_not_hold_a_place_forever(fake_gateway):
    """The limit is 30 s; here only: the connection's end is noticed while the body is read."""
    host, _, port = fake_gateway.http.rpartition(":")
    for _ in range(5):
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
            time.sleep(0.05)
    wait_until(
        lambda: (
            httpx.post(f"{fake_gateway.url}/v1/completions", json=COMPLETION).status_code == 200
        ),
        what="places are free again",
    )


def test_https_and_grpcs_with_a_certificate(fake, folder, tmp_path):
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    line = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    line += f" -keyout {key} -out {cert} -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run(line.split(), check=True, capture_output=True)
    arguments = ["--tokenizer", folder, "--tls-cert", cert, "--tls-key", key]
    arguments += ["--grpc-listen", "127.0.0.1:0"]
    with running_gateway(fake.target, *arguments, scratch=tmp_path) as running:
        port = running.http.rpartition(":")[2]
        with httpx.Client(verify=ssl.create_default_context(cafile=cert)) as client:
            answer = client.post(f"https://localhost:{port}/v1/completions", json=COMPLETION)
            assert answer.status_code == 200
        credentials = grpc.ssl_channel_credentials(cert.read_bytes())
        target = f"localhost:{running.grpc.rpartition(':')[2]}"
        with grpc.secure_channel(target, credentials) as channel:
            live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
            assert live(b"", timeout=10) == b"\x08\x01"
