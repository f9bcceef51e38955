"""doractl generate and score."""

import json

import numpy as np
import pytest
from dorad.cli.app import app
from lib.server import wait_until
from test_text import make_folder
from typer.testing import CliRunner


@pytest.fixture
def model(tmp_path):
    return make_folder(tmp_path / "model")


def test_generates_from_token_ids(doractl):
    assert doractl("generate", "--token-ids", "1,2 3", "--max-tokens", "3") == "6 7 8\n"


def test_generates_text_through_the_chat_template(doractl, server, model):
    out = doractl("generate", "hi", "--model", model, "--max-tokens", "4", "--system", "be kind")
    request = server.generate_calls[0]
    ids = np.frombuffer(request.prompt_token_ids, "<i4")
    assert out.endswith("\n") and request.stop.max_tokens == 4
    from dorad.text import ModelText

    sent = ModelText(model).decode(ids, skip_special_tokens=False)
    assert sent == "<|system|>be kind</s>\n<|user|>hi</s>\n<|assistant|>"


def test_generates_raw_text_from_standard_input(doractl, server, model):
    doractl("generate", "--raw", "-m", model, stdin="abc")
    assert np.frombuffer(server.generate_calls[0].prompt_token_ids, "<i4").size == 3


def test_generates_side_by_side_in_one_go(doractl, server, folder):
    doractl("adapters", "publish", "a", folder)
    out = doractl(
        "generate", "--token-ids", "1", "-a", "a", "-a", "a@1", "--base", "-n", "2",
        "--max-tokens", "2", "--temperature", "0", "--seed", "5",
    )  # fmt: skip
    assert out.count("== a@1: stop, 2 tokens") == 2 and "== base · 1:" in out
    assert sorted(r.adapter for r in server.generate_calls) == ["", "a", "a@1"]
    assert all(r.sampling.seed == 5 and r.n == 2 for r in server.generate_calls)


def test_changes_of_logits_are_sent(doractl, server):
    doractl(
        "generate", "--token-ids", "1", "--base",
        "--presence-penalty", "0.5", "--frequency-penalty", "-0.25", "--repetition-penalty", "1.5",
        "--logit-bias", "7=-2.5", "--logit-bias", "9=1", "--allowed-token-ids", "7,9",
        "--bad-words", "1,2", "--bad-words", "3",
    )  # fmt: skip
    sampling = server.generate_calls[0].sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.25)
    assert sampling.repetition_penalty == 1.5
    assert np.frombuffer(sampling.logit_bias_token_ids, "<i4").tolist() == [7, 9]
    assert np.frombuffer(sampling.logit_biases, "<f4").tolist() == [-2.5, 1.0]
    assert np.frombuffer(sampling.allowed_token_ids, "<i4").tolist() == [7, 9]
    words = [np.frombuffer(word.token_ids, "<i4").tolist() for word in sampling.bad_words]
    assert words == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("words", "expected"), [((), None), (["--ngram-drafts"], True), (["--no-ngram-drafts"], False)]
)
def test_guesses_from_repetitions_are_the_servers_choice_unless_told(
    doractl, server, words, expected
):
    made = doractl("generate", "--token-ids", "1", "--base", *words, "-o", "json")
    (call,) = server.generate_calls
    assert (call.ngram_drafts if call.HasField("ngram_drafts") else None) == expected
    usage = json.loads(made)[0]["usage"]
    assert usage["draft_tokens"] == usage["accepted_draft_tokens"] == 0


def test_a_bias_needs_a_token_and_a_number(doractl, server):
    out = doractl("generate", "--token-ids", "1", "--base", "--logit-bias", "7:1", code=64)
    assert "7:1" in out and server.generate_calls == []


def test_generate_as_json(doractl):
    out = doractl(
        "generate",
        "--token-ids",
        "1",
        "-n",
        2,
        "--max-tokens",
        2,
        "--logprobs",
        "raw",
        "-o",
        "json",
    )
    first, second = json.loads(out)
    assert first["token_ids"] == [1, 2] and first["finish_reason"] == "stop"
    assert second["token_ids"] == [11, 12] and second["index"] == 1
    assert second["logprobs"] == pytest.approx([-0.12, -0.13])
    assert second["spans"] == [{"adapter": "", "version": 0, "digest": "", "begin": 0, "end": 2}]


def test_scores(doractl, folder):
    doractl("adapters", "publish", "a", folder)
    out = doractl("score", "--token-ids", "1,2,3", "-a", "a", "--base", "--per-token")
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["#", "ID", "TOKEN", "base", "a@1"]
    assert lines[3] == ["2", "3", "3", "-0.0300", "-0.0400"]
    assert lines[5][:4] == ["base", "2", "-0.0500", "-0.0250"]
    scores = json.loads(doractl("score", "--token-ids", "1,2", "-o", "json"))["scores"]
    assert scores[0]["logprobs"] == [None, pytest.approx(-0.02)]


@pytest.mark.parametrize("words", [(), ("--per-token",)])
def test_a_single_token_has_no_score(server, words):
    arguments = ["score", "--token-ids", "1", "--base", *words, "--target", server.target]
    result = CliRunner().invoke(app, arguments, prog_name="doractl")
    assert result.exit_code == 0 and "nan" not in result.stdout.lower()
    assert result.stdout.splitlines()[-1].split() == ["base", "0", "-", "-", "-"]
    assert result.stderr == "one token has no log-probability: nothing comes before it\n"


def test_interrupting_generate_cancels_on_the_server(server):
    """A Ctrl-C in a terminal: the process ends with 130 and the server's slot is free."""
    import os
    import signal
    import subprocess
    import sys

    server.endless, server.token_delay = True, 0.01
    # Tests that run in the background may ignore the signal, and hand that on.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    code += "from dorad.cli import main; main()"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "DORAD_TARGET": server.target}
    process = subprocess.Popen(
        [sys.executable, "-c", code, "generate", "--token-ids", "1"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        wait_until(lambda: server.running == 1, 20)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130 and b"Traceback" not in stderr
    wait_until(lambda: server.running == 0)


def test_generate_ends_at_a_stop_string(doractl, server, model):
    """The fake's tokens count up; the tokenizer's token i is the i-th character."""
    options = ("generate", "--token-ids", "64", "-m", model, "--max-tokens", "20")
    whole = doractl(*options).rstrip("\n")
    stop = whole[6:8]
    assert doractl(*options, "--stop", "absent", "--stop", stop) == whole[:6] + "\n"
    (answer,) = json.loads(doractl(*options, "--stop", stop, "--logprobs", "raw", "-o", "json"))
    assert answer["text"] == whole[:6] and answer["stop"] == stop
    assert answer["token_ids"] == list(range(64, 72)) and len(answer["logprobs"]) == 8
    assert answer["finish_reason"] == "stop" and answer["spans"][-1]["end"] == 8


def test_a_stop_string_cancels_the_call(doractl, server, model):
    server.endless = True
    options = ("generate", "--token-ids", "64", "-m", model, "-n", "2", "--stop", "k")
    assert doractl(*options, "-o", "json").count('"stop": "k"') == 2
    wait_until(lambda: server.cancelled)


def test_stop_strings_need_a_tokenizer(doractl):
    doractl("generate", "--token-ids", "1", "--stop", "x", code=64)


def test_generate_sends_stop_sequences_and_truncation(doractl, server):
    out = doractl(
        "generate", "--token-ids", "1,2,3", "--max-tokens", "2", "--stop-sequence", "5,6",
        "--stop-sequence", "7", "--truncate-prompt-tokens", "2", "--prompt-logprobs", "-o", "json",
    )  # fmt: skip
    request = server.generate_calls[0]
    sent = [np.frombuffer(s.token_ids, "<i4").tolist() for s in request.stop.stop_sequences]
    assert sent == [[5, 6], [7]] and request.truncate_prompt_tokens == 2
    (answer,) = json.loads(out)
    assert answer["prompt_logprobs"] == [None, pytest.approx(-0.03)]
