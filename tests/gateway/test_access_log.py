"""The gateway's log: a line for each request, its form and its level, and nothing secret."""

import contextlib
import re

import httpx
import pytest
from fake_server import overloaded
from lib.gateway import running_gateway
from lib.gateway_clients import COMPLETION
from lib.server import wait_until

SECRET = "hush-this-is-a-token"
PROMPT = "a text that nobody may read"


def lines_of(running, request_id):
    """The request's lines, after the first of them has been written."""

    def found():
        lines = running.log()
        return [line for line in lines if line.get("request_id", "").startswith(request_id)]

    wait_until(found, 60), running.log()
    return found()


@pytest.fixture
def logged(fake, folder, tmp_path):
    with contextlib.ExitStack() as stack:

        def start(*arguments):
            running = stack.enter_context(
                running_gateway(fake.target, "--tokenizer", folder, *arguments, scratch=tmp_path)
            )
            http = stack.enter_context(httpx.Client(base_url=running.url, timeout=30))
            return running, http

        yield start


def test_a_request_is_told_in_one_line(logged):
    running, http = logged()
    headers = {"x-request-id": "told-1", "authorization": f"Bearer {SECRET}"}
    body = {**COMPLETION, "prompt": PROMPT}
    answer = http.post("/v1/completions", json=body, headers=headers)
    (line,) = lines_of(running, "told-1")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", line.pop("ts"))
    assert line.pop("peer").startswith("127.0.0.1:") and line.pop("seconds") > 0
    assert line == {
        "level": "info",
        "msg": "request ended",
        "request_id": "told-1",
        "endpoint": "completions",
        "model": "fake-model",
        "status": "200",
        "prompt_tokens": answer.json()["usage"]["prompt_tokens"],
        "completion_tokens": 4,
        "received_bytes": int(answer.request.headers["content-length"]),
        "sent_bytes": len(answer.content),
    }
    text = running.log_path.read_text()
    assert SECRET not in text and PROMPT not in text


def test_a_stream_is_told_when_it_ends(logged):
    running, http = logged()
    headers = {"x-request-id": "stream-1"}
    answer = http.post("/v1/completions", json={**COMPLETION, "stream": True}, headers=headers)
    (line,) = lines_of(running, "stream-1")
    assert line["sent_bytes"] == len(answer.content) and line["completion_tokens"] == 4


@pytest.mark.parametrize("streamed", [False, True])
def test_a_failure_says_why(fake, logged, streamed):
    running, http = logged()
    fake.refuse_generate = [overloaded(1.5)]
    body = {**COMPLETION, "stream": streamed}
    http.post("/v1/completions", json=body, headers={"x-request-id": "full"})
    (line,) = lines_of(running, "full")
    assert (line["status"], line["reason"], line["completion_tokens"]) == ("429", "QUEUE_FULL", 0)


def test_a_failure_after_the_first_token_says_why(fake, logged):
    running, http = logged()
    fake.break_after = 2
    headers = {"x-request-id": "lost"}
    http.post("/v1/completions", json={**COMPLETION, "stream": True}, headers=headers)
    (line,) = lines_of(running, "lost")
    assert (line["status"], line["reason"]) == ("200", "SERVER_LOST")


def test_the_open_inference_protocol_is_told_too(logged):
    running, http = logged()
    body = {"input_ids": [5, 6], "max_tokens": 3}
    headers = {"x-request-id": "oip"}
    http.post("/v2/models/fake-model/generate", json=body, headers=headers)
    (line,) = lines_of(running, "oip")
    assert (line["endpoint"], line["model"]) == ("oip_generate", "fake-model")
    assert (line["prompt_tokens"], line["completion_tokens"]) == (2, 3)


def test_a_model_name_neither_breaks_nor_fills_the_log(logged):
    running, http = logged()
    name = "x\n\u2028" * 10_000
    body = {**COMPLETION, "model": name}
    http.post("/v1/completions", json=body, headers={"x-request-id": "long"})
    (line,) = lines_of(running, "long")
    assert line["model"] == name[:256]


def test_probes_are_told_at_level_debug_only(logged):
    running, http = logged()
    http.get("/health", headers={"x-request-id": "probe"})
    http.get("/v1/models", headers={"x-request-id": "models"})
    assert lines_of(running, "models")
    assert not [line for line in running.log() if line.get("request_id") == "probe"]


def test_level_debug_tells_probes(logged):
    running, http = logged("--log-level", "debug")
    http.get("/health", headers={"x-request-id": "probe"})
    (line,) = lines_of(running, "probe")
    assert line["level"] == "debug" and line["endpoint"] == "health"


def test_level_warning_tells_no_requests(fake, logged):
    running, http = logged("--log-level", "warning")
    assert http.post("/v1/completions", json=COMPLETION).status_code == 200
    assert running.log() == []


def test_text_is_for_terminals(logged):
    running, http = logged("--log-format", "text")
    http.get("/v1/models/fake-model", headers={"x-request-id": "shown"})
    wait_until(lambda: "shown" in running.log_path.read_text(), 60)
    (line,) = [x for x in running.log_path.read_text().splitlines() if "shown" in x]
    assert re.match(r'\S+Z info request ended request_id="shown" peer="127.0.0.1:\d+" ', line)
    assert 'endpoint="model" model="fake-model" status="200"' in line
