"""dorad-load through OpenAI's route of the gateway."""

import json
import sys

import pytest
from lib.gateway import running_gateway
from lib.server import environment
from lib.zygote import run

PROGRAM = "import sys; from dorad.cli import load_main; sys.argv[0] = 'dorad-load'; load_main()"


def load(*words, code=0, **variables):
    line = [sys.executable, "-c", PROGRAM, *map(str, words)]
    result = run(line, env=environment(**variables))
    assert result.returncode == code, (result.stdout, result.stderr)
    return result.stderr if code else result.stdout


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text('{"token_ids": [5, 6, 7]}\n{"token_ids": [8, 9]}\n')
    return file


@pytest.fixture
def vocabulary(tmp_path):
    folder = tmp_path / "vocabulary"
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 100, "eos_token_id": 2}')
    return folder


def test_load_is_sent_to_the_openai_route(fake, tmp_path, data):
    fake.token_delay = 0.001
    with running_gateway(fake.target, scratch=tmp_path) as gateway:
        out = load(
            "--openai", gateway.url, "-c", 3, "--requests", 12, "--data", data,
            "--output-tokens", 5, "-o", "json",
        )  # fmt: skip
    report = json.loads(out)
    assert report["requests"] == 12 and report["failed"] == 0
    assert report["generated_tokens"] == 60 and report["prompt_tokens"] == 30
    assert report["ttft_ms"]["max"] > 0 and report["itl_ms"]["p50"] > 0
    assert len(fake.generate_calls) == 12 and fake.most_running <= 3
    assert all(call.stop.ignore_eos for call in fake.generate_calls)


def test_random_prompts_need_the_vocabulary(fake, tmp_path, vocabulary):
    with running_gateway(fake.target, scratch=tmp_path) as gateway:
        words = ["--openai", gateway.url, "-c", 1, "--requests", 3, "--output-tokens", 1]
        assert "vocabulary" in load(*words, code=64)
        report = json.loads(load(*words, "-m", vocabulary, "--processes", 1, "-o", "json"))
    assert report["requests"] == 3 and report["failed"] == 0
    assert report["prompt_tokens"] == 3 * 128


def test_refusals_and_failures_of_the_route_are_told_apart(fake, tmp_path, data):
    words = ["-c", 1, "--requests", 4, "--data", data, "--output-tokens", 2, "-o", "json"]

    def report(*more):
        line = [sys.executable, "-c", PROGRAM, "--openai", gateway.url, *map(str, words), *more]
        result = run(line, env=environment())
        assert result.returncode == 1, result.stderr  # No request succeeded.
        return json.loads(result.stdout)

    with running_gateway(fake.target, scratch=tmp_path) as gateway:
        failed = report("-a", "nobody")
        assert failed["errors"] == {"ADAPTER_NOT_FOUND": 4}
        assert failed["refused"]["requests"] == 0
        fake.capacity = 0
        full = report()
        assert full["failed"] == 0 and full["refused"]["reasons"] == {"QUEUE_FULL": 4}
        assert full["refused"]["retry_after_ms"]["max"] == 20


def test_an_address_that_is_none_is_told(data, tmp_path):
    def said(url, **variables):
        return load("--openai", url, "--data", data, "--requests", 1, code=64, **variables)

    assert "not a URL" in said("127.0.0.1:8000")
    assert "give the address alone" in said("http://127.0.0.1:8000/v1/completions")
    assert "plain text" in said("http://gpu1:8000", DORAD_TOKEN="x")
    line = ["--openai", "http://127.0.0.1:1", "--data", data, "--requests", 1]
    assert "UNAVAILABLE" in load(*line, code=69)
