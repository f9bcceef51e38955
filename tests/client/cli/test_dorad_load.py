"""dorad-load: the requests that it sends and the plans that it refuses."""

import dataclasses
import json

import numpy as np
import pytest
from dorad.cli.load import app as load_app
from fake_server import FakeServer
from typer.testing import CliRunner


def test_closed_loop_sends_the_planned_requests(dorad_load, server, client, folder):
    client.publish("a", path=folder)
    server.token_delay = 0.001
    out = dorad_load(
        "-c", 4, "--requests", 20, "-a", "a=3", "-a", "base=1", "--prompt-tokens", "4:8",
        "--output-tokens", "5", "--shared-prefix", 3, "-o", "json",
    )  # fmt: skip
    report = json.loads(out)
    assert report["requests"] == len(server.generate_calls) == 20 and report["failed"] == 0
    assert report["generated_tokens"] == 100 and server.most_running <= 4
    assert set(report["requests_by_adapter"]) == {"a", "base"}
    assert report["itl_ms"]["max"] >= 1.0 and report["ttft_ms"]["max"] > 0
    prompts = [np.frombuffer(r.prompt_token_ids, "<i4") for r in server.generate_calls]
    assert {tuple(p[:3]) for p in prompts} == {tuple(prompts[0][:3])}
    assert {len(p) for p in prompts} <= set(range(4, 9)) and len({len(p) for p in prompts}) > 1
    assert all(2 not in prompt for prompt in prompts)  # The end-of-sequence token.
    assert all(request.stop.ignore_eos for request in server.generate_calls)


def test_open_loop_keeps_its_rate_and_counts_failures(dorad_load, server):
    server.capacity = 1
    server.token_delay = 0.02
    report = json.loads(
        dorad_load("--rate", 200, "--requests", 40, "--output-tokens", 4, "-o", "json")
    )
    assert report["loop"] == "open" and report["requests"] == 40
    refused = report["refused"]
    assert refused["reasons"] == {"QUEUE_FULL": refused["requests"]}
    assert 0 < refused["requests"] < 40 and report["failed"] == 0 and report["errors"] == {}
    assert refused["retry_after_ms"]["max"] == 20 and refused["without_retry_after"] == 0
    assert refused["latency_ms"]["mean"] > 0
    assert len(server.generate_calls) == 40  # A refusal is a result: nothing is sent again.


def test_latencies_count_from_the_planned_arrival(server):
    """A server that stalls must not hide it by making the generator wait."""
    import asyncio

    from dorad import load

    server.token_delay = 0.3
    plan = load.Plan(
        load.Lengths.parse("2"), load.Lengths.parse("2"), load.Popularity.parse([], None),
        rate=1000.0, requests=70,
    )  # fmt: skip
    report = asyncio.run(load.run(load.Grpc(server.target, timeout=30), plan))
    # The fake server has 64 threads: the last six wait for a whole request.
    assert report["e2e_ms"]["max"] > 1000 and report["e2e_ms"]["p50"] > 500
    assert report["ttft_ms"]["max"] > 500


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [("--seed", -1, "seed"), ("--seed", 2**64, "seed"), ("--output-tokens", 5 * 10**9, "length")],
)
def test_a_plan_that_no_request_can_carry_is_a_usage_error(
    dorad_load, server, option, value, words
):
    assert words in dorad_load("--rate", 20, "-d", 1, option, value, code=64)
    assert not server.generate_calls


def test_a_fault_of_the_generator_ends_an_open_loop(server, monkeypatch):
    import asyncio
    import itertools

    from dorad import _wire, load

    written, calls = _wire.generate_request, itertools.count()

    def broken(*args, **kwargs):
        if next(calls) == 0:  # Long before the last one.
            raise RuntimeError("broken")
        return written(*args, **kwargs)

    monkeypatch.setattr(_wire, "generate_request", broken)
    plan = load.Plan(
        load.Lengths.parse("2"), load.Lengths.parse("2"), load.Popularity.parse([], None),
        rate=100.0, requests=10,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(load.run(load.Grpc(server.target, timeout=30), plan))


@pytest.mark.parametrize("processes", [1, 2])
def test_load_asks_the_admin_listener_what_the_model_is(processes):
    arguments = ["-c", 2, "--requests", 4, "--output-tokens", 2, "--processes", processes]
    with FakeServer(admin_listener=True) as split:
        given = {"DORAD_TARGET": split.target, "DORAD_ADMIN_TARGET": split.admin_target}
        result = CliRunner(env=given).invoke(load_app, [*map(str, arguments), "-o", "json"])
        assert result.exit_code == 0, (result.output, result.exception)
        assert json.loads(result.stdout)["failed"] == 0
        result = CliRunner().invoke(load_app, ["--target", split.target, "--requests", "1"])
        assert result.exit_code == 1 and "DORAD_ADMIN_TARGET" in result.stderr


def test_the_warm_up_is_sent_but_does_not_count(dorad_load, server):
    server.token_delay = 0.01
    report = json.loads(
        dorad_load("-c", 2, "--warmup", 0.5, "--requests", 4, "--output-tokens", 5, "-o", "json")
    )
    assert report["requests"] == 4 and report["generated_tokens"] == 20
    assert len(server.generate_calls) > 8
    assert report["generator"]["loop_lag_ms"]["max"] >= 0


def test_several_processes_send_one_plan_together(dorad_load, server):
    out = dorad_load(
        "-c", 5, "--requests", 21, "--processes", 2, "--output-tokens", 3, "-o", "json"
    )  # fmt: skip
    report = json.loads(out)
    assert report["requests"] == len(server.generate_calls) == 21
    assert report["generated_tokens"] == 63 and report["generator"]["processes"] == 2
    assert server.most_running <= 5
    prompts = [bytes(call.prompt_token_ids) for call in server.generate_calls]
    assert len(set(prompts)) == 21


def test_the_processes_of_a_plan_share_its_prefix(dorad_load, server):
    dorad_load(
        "-c", 2, "--requests", 8, "--processes", 2, "--output-tokens", 1, "--seed", 3,
        "--prompt-tokens", 9, "--shared-prefix", 6,
    )  # fmt: skip
    prompts = [np.frombuffer(call.prompt_token_ids, "<i4") for call in server.generate_calls]
    assert len({tuple(prompt[:6]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 8


def test_parts_of_a_plan_have_the_prefix_of_the_whole():
    from dorad.load import Vocabulary
    from dorad.load.plan import Lengths, Plan, Popularity, Source

    words = Vocabulary(1000, frozenset({2}))
    length, popularity = Lengths.parse("9"), Popularity.parse([], None)
    plan = Plan(length, length, popularity, rate=1.0, shared_prefix=6, seed=3)
    parts = [*plan.split(4), *plan.split(2)[1].split(2), plan]
    assert len({tuple(Source(part, words).next().token_ids[:6]) for part in parts}) == 1
    other = Source(dataclasses.replace(plan, seed=4), words).next()
    assert other.token_ids[:6] != Source(plan, words).next().token_ids[:6]


def test_a_plan_too_small_for_its_processes_is_refused(dorad_load, server):
    assert "concurrency" in dorad_load("-c", 1, "--processes", 2, code=64)


def test_all_failed_exits_with_1(dorad_load, server):
    server.capacity = 0
    dorad_load("-c", 1, "--requests", 2, code=1)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--prompt-tokens", "5:2"],
        ["--output-tokens", "0"],
        ["--rate", "1", "-c", "1"],
        ["-a", "a=2", "--zipf", "1"],
        ["-a", "a=0"],
    ],
)
def test_load_refuses_bad_plans(dorad_load, server, arguments):
    assert dorad_load(*arguments, code=64).startswith("dorad-load: ")
    assert server.generate_calls == []


def test_distributions_have_the_stated_means():
    import random

    from dorad.load import Lengths, Popularity

    rng = random.Random(1)
    draws = [Lengths.parse("lognormal:200:0.5").draw(rng) for _ in range(20_000)]
    assert 195 < np.mean(draws) < 205
    assert max(Lengths.parse("lognormal:200:0.5:300").draw(rng) for _ in range(1000)) == 300
    popularity = Popularity.parse(["a", "b", "base"], 1.0)
    counts = [popularity.draw(rng) for _ in range(11_000)]
    assert counts.count("a") == pytest.approx(6000, rel=0.05)
    assert counts.count(None) == pytest.approx(2000, rel=0.1)
