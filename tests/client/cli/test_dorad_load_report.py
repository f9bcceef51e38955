"""What dorad-load reports: failures, rates, goals and its own limits."""

import dataclasses
import json

import pytest
from dorad.v1 import types_pb2
from fake_server import overloaded, shutting_down


def test_rates_are_without_the_drain():
    """20 requests a second for 10 s from two processes, of which one answer takes 50 s."""
    from dorad.load.plan import Goals, Lengths, Plan, Popularity
    from dorad.load.records import Outcome, Record
    from dorad.load.report import summarise

    def outcome(began, ends):
        records = [
            Record(None, 3, end - 0.5, end - 0.5, 0.1, tokens=2, timely_tokens=2, end=end)
            for end in ends
        ]
        return Outcome(records, began, max(ends), 1.0, [0.0])

    plan = Plan(
        Lengths.parse("3"), Lengths.parse("2"), Popularity.parse([], None),
        rate=20.0, duration=10.0, goals=Goals(e2e=1.0),
    )  # fmt: skip
    halves = [outcome(began, [began + 0.6 + i * 0.09 for i in range(100)]) for began in (5.0, 5.5)]
    straggler = halves[0].records[-1]
    straggler.end, straggler.timely_tokens = 65.0, 1
    halves[0].ended = 65.0
    report = summarise(plan, halves)
    assert report["requests"] == 200 and report["generated_tokens"] == 400
    assert report["seconds"] == 60 and report["drain_seconds"] == 50
    assert report["requests_per_second"] == report["goodput"]["requests_per_second"] == 19.9
    assert report["generated_tokens_per_second"] == 39.9
    assert report["prompt_tokens_per_second"] == pytest.approx(59.7)

    of_the_warm_up = Record(None, 3, 4.0, 4.0, 0.1, tokens=2, timely_tokens=1, end=6.0)
    halves[1].records.append(of_the_warm_up)
    report = summarise(plan, halves)
    assert report["requests"] == 200 and report["requests_per_second"] == 20

    report = summarise(dataclasses.replace(plan, duration=None, requests=200), halves)
    assert report["drain_seconds"] is None
    assert report["requests_per_second"] == pytest.approx(200 / 60)
    # The requests were over long before the time.
    report = summarise(dataclasses.replace(plan, duration=1000.0, requests=200), halves)
    assert report["drain_seconds"] == 0
    assert report["requests_per_second"] == pytest.approx(201 / 60)


@pytest.mark.parametrize("processes", [1, 2])
def test_tokens_of_the_drain_are_not_in_the_rate(dorad_load, server, processes):
    server.token_delay = 0.2
    arguments = ["-c", 2, "-d", 0.5, "--output-tokens", 10, "--processes", processes, "-o", "json"]
    report = json.loads(dorad_load(*arguments))
    assert report["requests"] == 2 and report["generated_tokens"] == 20
    assert report["requests_per_second"] == 0 and report["drain_seconds"] > 1
    assert 0 < report["generated_tokens_per_second"] <= 6 / 0.5


def test_goodput_counts_requests_that_keep_every_goal(dorad_load, server):
    server.token_delay = 0.01
    arguments = ["-c", 2, "--requests", 10, "--output-tokens", 5, "-o", "json"]
    assert json.loads(dorad_load(*arguments))["goodput"] is None
    goodput = json.loads(dorad_load(*arguments, "--goal-e2e", 60000))["goodput"]
    assert goodput["share"] == 1 and goodput["requests"] == 10
    goodput = json.loads(dorad_load(*arguments, "--goal-ttft", 60000, "--goal-itl", 5))["goodput"]
    assert goodput["share"] == 0 and goodput["goals_ms"]["itl"] == 5


def test_an_answer_without_tokens_keeps_no_goal_of_the_first_token():
    from dorad.load.plan import Goals, Lengths, Plan, Popularity
    from dorad.load.records import Outcome, Record
    from dorad.load.report import summarise

    plan = Plan(
        Lengths.parse("1"), Lengths.parse("1"), Popularity.parse([], None),
        concurrency=1, goals=Goals(ttft=60.0),
    )  # fmt: skip
    record = Record(None, 1, 10.0, 10.0, messages=1, end=11.0)
    assert summarise(plan, [Outcome([record], 10.0, 20.0, 1.0, [0.0])])["goodput"]["share"] == 0


def test_the_generator_says_when_it_was_the_bottleneck():
    from dorad.load.plan import Lengths, Plan, Popularity
    from dorad.load.records import Outcome, Record
    from dorad.load.report import summarise

    plan = Plan(Lengths.parse("1"), Lengths.parse("1"), Popularity.parse([], None), rate=1.0)

    def report(cpu, lag, late):
        record = Record(None, 1, 10.0, 10.0 + late, 0.1, tokens=1, messages=1, end=11.0)
        return summarise(plan, [Outcome([record], 10.0, 20.0, cpu, [lag])])["generator"]

    assert not report(5.0, 0.01, 0.01)["bottleneck"]
    assert "busy" in report(9.5, 0.01, 0.01)["why"][0]
    assert "lag" in report(5.0, 0.2, 0.01)["why"][0]
    assert "late" in report(5.0, 0.01, 0.3)["why"][0]


def test_report_as_a_table(dorad_load):
    out = dorad_load("-c", 2, "-d", 0.2, "--output-tokens", 3)
    assert "first token" in out and "tokens/s" in out and "generator:" in out
    assert "rates exclude the last" in out


def test_failures_are_not_refusals(dorad_load, server):
    server.break_after = 0
    report = json.loads(dorad_load("-c", 1, "--requests", 3, "-o", "json", code=1, want="stdout"))
    assert report["errors"] == {"UNAVAILABLE": 3} and report["refused"]["requests"] == 0


@pytest.mark.parametrize(
    ("end", "reason"), [(shutting_down, "SHUTTING_DOWN"), (overloaded(None), "QUEUE_FULL")]
)
def test_what_has_begun_to_answer_is_not_refused(dorad_load, server, end, reason):
    arguments = ["-c", 1, "--requests", 3, "-o", "json"]
    server.break_with, server.break_after = end, 0
    report = json.loads(dorad_load(*arguments, code=1, want="stdout"))
    assert report["refused"]["reasons"] == {reason: 3} and report["failed"] == 0
    server.break_after = 2
    report = json.loads(dorad_load(*arguments, code=1, want="stdout"))
    assert report["errors"] == {reason: 3} and report["refused"]["requests"] == 0


@pytest.mark.parametrize("reason", ["ABORTED", "NON_FINITE"])
def test_samples_that_were_cut_short_are_failures(dorad_load, server, reason):
    server.finish_reason = types_pb2.FinishReason.Value(f"FINISH_REASON_{reason}")
    arguments = ["-c", 1, "--requests", 3, "--goal-e2e", 60000, "-o", "json"]
    report = json.loads(dorad_load(*arguments, code=1, want="stdout"))
    assert report["failed"] == 3 and report["errors"] == {reason: 3}
    assert report["goodput"]["requests"] == 0 and report["e2e_ms"] is None
