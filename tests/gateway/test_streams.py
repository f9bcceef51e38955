"""Streams as they come, those that fail, and readers that go away or stop."""

import asyncio
import contextlib
import http.client
import json

import dorad
import grpc
import httpx
import openai
import pytest
from fake_server import overloaded
from lib.gateway import running_gateway, stream_tokens
from lib.gateway_clients import COMPLETION, grpc_stream, stuck_readers
from lib.server import wait_until

JSON = {"Content-Type": "application/json"}


def test_tokens_are_sent_as_they_come(fake, fake_http):
    fake.endless = True
    body = {**COMPLETION, "stream": True}
    with fake_http.stream("POST", "/v1/completions", json=body) as answer:
        lines = filter(None, answer.iter_lines())
        for _ in range(4):  # An answer that came as a whole would never come.
            assert json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"]
        assert fake.running == 1


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


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_goes_away_cancels_on_the_server(fake, fake_gateway, streamed):
    fake.endless, fake.token_delay = True, 0.005
    body = {**COMPLETION, "max_tokens": 1000, "stream": streamed, "stop": "no such text"}
    with contextlib.closing(http.client.HTTPConnection(fake_gateway.http)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), JSON)
        wait_until(lambda: fake.running == 1, what="the call has begun")
        if streamed:
            assert connection.getresponse().readline()
    wait_until(lambda: fake.cancelled == 1 and fake.running == 0, what="the call was cancelled")


def test_a_reader_that_stops_reading_gives_its_place_back(fake, folder, tmp_path):
    fake.endless, fake.token_delay = True, 0.05
    arguments = ["--tokenizer", folder, "--max-requests", 1, "--timeout", 6, "--drain", 2]
    with (
        running_gateway(fake.target, *arguments, scratch=tmp_path) as running,
        httpx.Client(base_url=running.url) as http,
        stuck_readers(running, 1),
    ):
        wait_until(lambda: http.get("/v1/models").status_code == 429, what="no place is free")
        wait_until(lambda: http.get("/v1/models").status_code == 200, 30, "it is free again")


def test_a_grpc_reader_that_stops_reading_gives_its_place_back(fake, folder, tmp_path):
    fake.endless, fake.token_delay = True, 0.002
    arguments = ["--tokenizer", folder, "--grpc-listen", "127.0.0.1:0", "--max-requests", 1]
    arguments += ["--timeout", 6, "--drain", 2]
    with (
        running_gateway(fake.target, *arguments, scratch=tmp_path) as running,
        httpx.Client(base_url=running.url) as http,
        grpc_stream(running) as call,
    ):
        assert http.get("/v1/models").status_code == 429
        wait_until(lambda: http.get("/v1/models").status_code == 200, 30, "the place is free again")
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "STREAM_NOT_READ" in caught.value.details()


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


def test_200_streams_at_a_time_lose_nothing(gateway, grpc_client, base):
    """Each has the tokens of the same prompt and seed through gRPC."""
    prompts = [[1, 40 + i % 50, 77, i % 90] for i in range(200)]
    options = {"max_tokens": 24, "ignore_eos": True}

    async def all_of_them():
        return await asyncio.gather(
            *(
                stream_tokens(
                    gateway.http,
                    {"model": base, "prompt": prompt, "seed": seed, "stream": True}
                    | {"return_token_ids": True, **options},
                )
                for seed, prompt in enumerate(prompts)
            )
        )

    wanted = grpc_client.generate_many(
        dorad.GenerateRequest(prompt, seed=seed, **options) for seed, prompt in enumerate(prompts)
    )
    assert asyncio.run(all_of_them()) == [sample.token_ids.tolist() for (sample,) in wanted]
