"""A server that is full or hangs, and many or long requests."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from fake_server import overloaded
from lib.gateway import running_gateway
from lib.gateway_clients import COMPLETION
from lib.server import wait_until


def test_a_full_queue_is_429_with_the_servers_hint(fake, fake_http):
    fake.refuse_generate = [overloaded(1.5)]
    answer = fake_http.post("/v1/completions", json=COMPLETION)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "QUEUE_FULL")
    assert answer.headers["retry-after"] == "2" and answer.headers["retry-after-ms"] == "1500"
    assert len(fake.generate_calls) == 1  # The gateway itself does not try again.


def test_all_who_call_while_the_server_hangs_wait_one_timeout(fake, folder, tmp_path):
    fake.hang_info = True
    with (
        running_gateway(fake.target, "--tokenizer", folder, scratch=tmp_path) as running,
        httpx.Client(base_url=running.url, timeout=60) as http,
        ThreadPoolExecutor(40) as pool,
    ):
        answers = pool.map(lambda _: http.post("/v1/completions", json=COMPLETION), range(40))
        assert [answer.status_code for answer in answers] == [504] * 40
    # One for all, another should a caller come late, and the gateway's own at the start and while
    # it runs. One for each caller would be 40 and more.
    assert [method for method, _ in fake.routing.seen].count("GetInfo") < 30


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
    wait_until(
        lambda: fake_http.post("/v1/completions", json=COMPLETION).status_code == 200,
        what="a place is free again",
    )


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
