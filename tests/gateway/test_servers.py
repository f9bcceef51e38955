"""Several servers behind one gateway: choice, loss, end and differences of servers."""

import contextlib
import json
import signal

import dorad
import grpc
import httpx
import numpy as np
import pytest
from dorad._routing import affinity, home_key
from dorad.v1 import types_pb2
from fake_server import FakeServer, fail, overloaded, shutting_down
from fake_server.errors import connection_lost
from grpc_health.v1 import health_pb2
from lib.gateway import ended_gateway, running_gateway
from lib.gateway_clients import COMPLETION
from lib.server import free_port, serve, wait_until
from prometheus_client.parser import text_string_to_metric_families

SERVING, AWAY = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
STREAM = {**COMPLETION, "stream": True, "return_token_ids": True}


def home_first(targets, prompt):
    """In the order in which the gateway asks idle servers for a prompt to the base model."""
    key = home_key("", prompt)
    return sorted(targets, key=lambda target: -affinity(target, key))


@pytest.fixture
def pair():
    """The first one is the home of COMPLETION."""
    with FakeServer() as one, FakeServer() as other:
        first = home_first([one.target, other.target], COMPLETION["prompt"])[0]
        yield (one, other) if first == one.target else (other, one)


@contextlib.contextmanager
def through(servers, scratch, *arguments):
    targets = [server if isinstance(server, str) else server.target for server in servers]
    with (
        running_gateway(targets, *arguments, scratch=scratch) as running,
        httpx.Client(base_url=running.url, timeout=60) as http,
    ):
        yield http


@pytest.fixture
def http(pair, folder, tmp_path):
    with through(pair, tmp_path, "--tokenizer", folder) as it:
        wait_until(lambda: ready_by_metrics(it) == [1, 1], 60)
        yield it


def publish(server, name, **options):
    with dorad.Client(server.target, timeout=30) as client:
        client.publish(name, tensors={"w": np.ones((2, 2), np.float32)}, config={}, **options)


def events(answer):
    data = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(event) for event in data]


def ready_by_metrics(http):
    return [
        sample.value
        for family in text_string_to_metric_families(http.get("/metrics").text)
        for sample in family.samples
        if sample.name == "dorad_gateway_server_ready"
    ]


def test_prompts_that_begin_alike_meet_on_one_server(pair, http):
    targets = [server.target for server in pair]
    prompts = [[n, 1] for n in range(8)]
    for prompt in prompts * 2:
        body = {**COMPLETION, "prompt": prompt}
        assert http.post("/v1/completions", json=body).status_code == 200
    homes = [home_first(targets, prompt)[0] for prompt in prompts]
    assert [len(server.generate_calls) for server in pair] == [
        2 * homes.count(target) for target in targets
    ]


def test_a_server_gets_no_more_than_its_bound(pair, http):
    for server in pair:
        server.endless, server.token_delay = True, 0.005
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            body = {**STREAM, "max_tokens": 1000}
            answer = stack.enter_context(http.stream("POST", "/v1/completions", json=body))
            lines = answer.iter_lines()
            next(lines)
            stack.callback(lines.close)
        assert [server.running for server in pair] == [3, 1]  # At most 1.25 * 5 / 2 with the next.
    wait_until(lambda: [server.running for server in pair] == [0, 0], 60)


@pytest.mark.parametrize("refuse", [connection_lost, shutting_down, overloaded(5.0)])
@pytest.mark.parametrize("body", [COMPLETION, STREAM])
def test_a_request_that_one_server_does_not_take_is_answered_by_another(pair, http, refuse, body):
    pair[0].refuse_generate = [refuse]
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert [len(server.generate_calls) for server in pair] == [1, 1]
    first, second = (server.generate_calls[0].request_id for server in pair)
    assert first == second


@pytest.mark.parametrize("body", [COMPLETION, {**STREAM, "max_tokens": 1}])
def test_an_answer_that_the_servers_end_cuts_short_is_repeated_elsewhere(pair, http, body):
    pair[0].finish_reason = types_pb2.FINISH_REASON_ABORTED
    pair[0].refuse_generate = [lambda _: pair[0].health.set("", AWAY)]
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200 and "abort" not in answer.text
    assert [len(server.generate_calls) for server in pair] == [1, 1]


def test_an_answer_that_somebody_aborts_is_not_repeated(pair, http):
    pair[0].finish_reason = types_pb2.FINISH_REASON_ABORTED
    answer = http.post("/v1/completions", json=COMPLETION)
    assert answer.json()["choices"][0]["finish_reason"] == "abort"
    assert [len(server.generate_calls) for server in pair] == [1, 0]


def test_a_stream_whose_server_is_lost_after_the_first_token_ends_with_a_clear_error(pair, http):
    pair[0].break_after = 2
    pair[0].refuse_generate = [lambda _: pair[0].health.set("", AWAY)]  # And it stays away.
    found = events(http.post("/v1/completions", json=STREAM))
    assert sum(len(e["choices"][0]["token_ids"]) for e in found[:-1]) == 2
    error = found[-1]["error"]
    assert error["code"] == "SERVER_LOST" and "in the middle of the answer" in error["message"]
    assert pair[1].generate_calls == []
    # The next request does not go there.
    pair[0].break_after = None
    assert http.post("/v1/completions", json=COMPLETION).status_code == 200
    assert [len(server.generate_calls) for server in pair] == [1, 1]


def test_the_last_failure_is_the_callers_when_no_server_takes_a_request(pair, http):
    for server in pair:
        server.refuse_generate = [overloaded(5.0)]
    answer = http.post("/v1/completions", json=COMPLETION)
    assert answer.status_code == 429 and answer.headers["retry-after"] == "5"
    assert [len(server.generate_calls) for server in pair] == [1, 1]


def test_a_wrong_request_is_asked_once(pair, http):
    def invalid(context):
        fail(context, grpc.StatusCode.INVALID_ARGUMENT, "TOP_P_OUT_OF_RANGE", "top_p is wrong")

    pair[0].refuse_generate = [invalid]
    answer = http.post("/v1/completions", json=COMPLETION)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "TOP_P_OUT_OF_RANGE"
    assert [len(server.generate_calls) for server in pair] == [1, 0]


def test_an_adapter_is_found_on_the_server_that_has_it(pair, http):
    publish(pair[1], "there")
    publish(pair[0], "here")
    for _ in range(20):
        for name in ("here", "there"):
            answer = http.post("/v1/completions", json={**COMPLETION, "model": name})
            assert answer.json()["choices"][0]["dorad"]["adapter"] == name
    # A server without the adapter is asked once in ten seconds, not for each request.
    assert sum(call.adapter == "there" for call in pair[0].generate_calls) < 10
    assert sum(call.adapter == "here" for call in pair[1].generate_calls) < 10


def test_models_are_those_of_all_servers(pair, http):
    publish(pair[0], "one")
    publish(pair[1], "two")
    publish(pair[0], "both")
    publish(pair[1], "both")
    publish(pair[1], "both")  # both@2 is active there, and both@1 on the first one.
    rows = {row["id"]: row["root"] for row in http.get("/v1/models").json()["data"]}
    assert rows == {
        "fake-model": "fake-model", "one": "one@1", "two": "two@1", "both": "both@2"
    }  # fmt: skip
    assert http.get("/v1/models/two").json()["root"] == "two@1"
    assert http.get("/v1/models/both").json()["root"] == "both@2"
    assert http.get("/v2/models/one/ready").status_code == 200
    assert http.get("/v2/models/two/versions/1/ready").status_code == 200
    assert http.get("/v2/models/three/ready").status_code == 404
    assert http.get("/v2/models/both").json()["versions"] == ["1", "2"]
    index = {(r["name"], r["version"]) for r in http.post("/v2/repository/index").json()}
    assert index == {("fake-model", ""), ("one", "1"), ("two", "1"), ("both", "1"), ("both", "2")}
    stats = {(r["name"], r["version"]) for r in http.get("/v2/models/stats").json()["model_stats"]}
    assert stats == index


def test_it_is_ready_while_one_server_is(pair, http):
    assert http.get("/health").status_code == 200
    pair[0].health.set("", AWAY)
    assert http.get("/health").status_code == 200
    assert http.get("/v2/health/ready").status_code == 200
    pair[1].health.set("", AWAY)
    assert http.get("/health").status_code == 503
    assert http.get("/v2/health/ready").status_code == 503
    pair[0].health.set("", SERVING)
    assert http.get("/health").status_code == 200


def test_a_server_that_drains_gets_no_new_requests_until_it_serves_again(pair, http):
    assert ready_by_metrics(http) == [1, 1]
    pair[0].health.set("", AWAY)
    wait_until(lambda: ready_by_metrics(http) == [0, 1], 60)
    for _ in range(3):
        assert http.post("/v1/completions", json=COMPLETION).status_code == 200
    assert [len(server.generate_calls) for server in pair] == [0, 3]
    pair[0].health.set("", SERVING)
    wait_until(lambda: ready_by_metrics(http) == [1, 1], 60)
    assert http.post("/v1/completions", json=COMPLETION).status_code == 200
    assert [len(server.generate_calls) for server in pair] == [1, 3]


def test_a_server_that_is_not_there_yet_joins_later(folder, tmp_path):
    port = free_port()
    with FakeServer() as first, through([f"127.0.0.1:{port}", first], tmp_path) as http:
        assert http.post("/v1/completions", json=COMPLETION).status_code == 200
        with FakeServer(port=port) as late:
            wait_until(lambda: ready_by_metrics(http) == [1, 1], 60)
            first.health.set("", AWAY)
            wait_until(lambda: ready_by_metrics(http) == [1, 0], 60)
            assert http.post("/v1/completions", json=COMPLETION).status_code == 200
            assert len(late.generate_calls) == 1


def test_servers_of_different_models_are_refused_at_the_start(pair):
    pair[0].model_digest, pair[1].model_digest = "a", "b"
    run = ended_gateway([server.target for server in pair])
    assert run.returncode == 64 and "different models" in run.stderr, run
    assert all(server.target in run.stderr for server in pair)


def test_a_server_that_returns_with_another_model_gets_no_requests(pair, http):
    pair[1].model_digest = "another"
    wait_until(lambda: ready_by_metrics(http) == [1, 0], 60)
    pair[0].refuse_generate = [connection_lost]
    assert http.post("/v1/completions", json=COMPLETION).status_code == 503
    assert pair[1].generate_calls == []


@pytest.mark.parametrize(
    "arguments", [["--admin-target", "127.0.0.1:1"], ["--target", "127.0.0.1:1"]]
)
def test_targets_that_do_not_fit_are_a_usage_error(arguments):
    run = ended_gateway(["127.0.0.1:1", "127.0.0.1:2"], *arguments)
    assert run.returncode == 64 and run.stderr.startswith("doractl: "), run


def test_targets_come_from_the_environment_too(pair, tmp_path):
    targets = " ".join(server.target for server in pair)
    with (
        running_gateway([], scratch=tmp_path, DORAD_TARGET=targets) as running,
        httpx.Client(base_url=running.url, timeout=60) as http,
    ):
        assert ready_by_metrics(http) == [1, 1]


def test_one_refusal_of_a_token_is_final(pair, http):
    for server in pair:
        server.deny_info = "no"
    wait_until(lambda: http.post("/v1/completions", json=COMPLETION).status_code == 403, 60)
    assert [server.generate_calls for server in pair if server.generate_calls] == []


def test_requests_outlive_the_kill_of_a_real_server(zoo, folder, tmp_path):
    """Whole answers are repeated elsewhere, bitwise the same; nobody gets an error."""
    body = {"model": "", "max_tokens": 64, "ignore_eos": True, "seed": 5}
    with (
        serve(folder) as kept,
        serve(folder, expect_exit=None) as killed,
        dorad.Client(kept.grpc) as client,
    ):
        body["model"] = client.info().model.name
        body["prompt"] = next(
            prompt
            for prompt in ([1, 40, n] for n in range(77, 177))
            if home_first([killed.grpc, kept.grpc], prompt)[0] == killed.grpc
        )
        (wanted,) = client.generate(body["prompt"], max_tokens=64, ignore_eos=True, seed=5)
        with through([killed.grpc, kept.grpc], tmp_path) as http:
            assert http.post("/v1/completions", json=body).status_code == 200
            killed.process.send_signal(signal.SIGKILL)
            for _ in range(3):
                answer = http.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"][0]["token_ids"] == wanted.token_ids.tolist()
            assert http.get("/health").status_code == 200


def test_the_grpc_route_passes_over_a_lost_server_too(pair, tmp_path):
    from lib.gateway_clients import pb, pb_grpc

    pair[0].refuse_generate = [connection_lost]
    targets = [server.target for server in pair]
    arguments = ["--grpc-listen", "127.0.0.1:0"]
    with (
        running_gateway(targets, *arguments, scratch=tmp_path) as running,
        grpc.insecure_channel(running.grpc) as channel,
    ):
        stub = pb_grpc.GRPCInferenceServiceStub(channel)
        request = pb.ModelInferRequest(model_name="fake-model")
        tensor = request.inputs.add(name="input_ids", datatype="INT64", shape=[2])
        tensor.contents.int64_contents.extend([5, 6])
        request.parameters["max_tokens"].int64_param = 2
        assert stub.ModelInfer(request, timeout=60).model_name == "fake-model"
    assert [len(server.generate_calls) for server in pair] == [1, 1]
