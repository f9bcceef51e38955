"""doractl and dorad-load against the fake server: output, JSON, exit codes."""

import dataclasses
import http.server
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import dorad
import grpc
import numpy as np
import pytest
from dorad.cli.app import app
from dorad.cli.load import app as load_app
from dorad.cli.top import Rates, parse_metrics
from dorad.v1 import types_pb2
from fake_server import FakeServer, fail, image_of, overloaded, shutting_down, wait_for
from lib.certificates import Authority
from test_text import make_folder
from typer.testing import CliRunner


@pytest.fixture
def doractl(server, monkeypatch):
    monkeypatch.setenv("DORAD_TARGET", server.target)
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments, code=0, stdin=None):
        result = CliRunner().invoke(
            app, [str(a) for a in arguments], input=stdin, prog_name="doractl"
        )
        assert result.exit_code == code, (result.output, result.exception)
        return result.stderr if code else result.stdout

    return run


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "adapter"
    path.mkdir()
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_bytes(image_of({"w": np.zeros((3, 100))}))
    return path


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "hello"], "--model"),
        (["generate", "hello", "--token-ids", "1"], "not both"),
        (["generate", "--token-ids", "1,x"], "'1,x' is not a list of integers"),
        (["generate", "--token-ids", "1", "--logprobs", "cooked"], "'raw', 'processed'"),
        (["generate", "--token-ids", "1", "-n", "0"], "--n"),
        (["generate", "hello", "--model", "/nowhere"], "/nowhere has no tokenizer.json"),
        (["frobnicate"], "frobnicate"),
        (["adapters", "retire", "a"], "which version of 'a'"),
        (["adapters", "publish", "a", "/nowhere"], "no adapter folder /nowhere"),
        (["adapters", "publish", "a", "/nowhere", "--tag", "x"], "KEY=VALUE"),
        (["adapters", "publish", "a", "out/a", "--server-side"], "on the server's host"),
        (["info", "--output", "xml"], "xml"),
        (["abort"], "give ids, --adapter or --all"),
        (["abort", "r1", "--all"], "give ids, --adapter or --all"),
        (["top", "--metrics", "file:///etc/passwd"], "not an http URL"),
        (["pause", "--mode", "nap"], "nap"),
    ],
)
def test_usage_errors_exit_with_64(doractl, arguments, words):
    error = doractl(*arguments, code=64)
    assert words in error and error.startswith("doractl: ") and len(error.splitlines()) <= 2


def test_an_unreachable_server_exits_with_69(doractl):
    error = doractl("info", "--target", "127.0.0.1:1", code=69)
    assert error.startswith("doractl: UNAVAILABLE") and len(error.splitlines()) == 1


def test_calls_that_the_server_offers_elsewhere_are_told_where(doractl):
    with FakeServer(admin_listener=True) as split:
        for command in (["info"], ["adapters", "list"], ["top"], ["limit-gpu-share", "0.5"]):
            error = doractl(*command, "--target", split.target, code=1)
            assert "UNIMPLEMENTED" in error and "--admin-target or DORAD_ADMIN_TARGET" in error
        doractl("info", "--target", split.target, "--admin-target", split.admin_target)


def test_plain_text_to_a_server_with_tls_gets_a_hint(doractl, tmp_path, monkeypatch):
    authority = Authority(tmp_path)
    certificate, key = authority.issue("server")
    pair = (key.read_bytes(), certificate.read_bytes())
    listener = grpc.server(ThreadPoolExecutor(1))
    credentials = grpc.ssl_server_credentials([pair])
    target = f"127.0.0.1:{listener.add_secure_port('127.0.0.1:0', credentials)}"
    listener.start()
    assert "DORAD_CA_FILE" in doractl("info", "--target", target, code=69)
    monkeypatch.setenv("DORAD_CA_FILE", str(authority.certificate))
    assert "UNIMPLEMENTED" in doractl("info", "--target", target, code=1)
    listener.stop(None)


def test_a_wait_for_the_next_attempt_is_told_once(server):
    server.refuse_generate = [overloaded(1.0), overloaded(1.0)]
    arguments = ["generate", "--token-ids", "1", "--max-tokens", "1", "--target", server.target]
    result = CliRunner().invoke(app, arguments, prog_name="doractl")
    assert result.exit_code == 0 and result.stdout == "1\n"
    [line] = result.stderr.splitlines()
    assert re.fullmatch(r"doractl: .*QUEUE_FULL.*; trying again in 1\.\d s", line)


def test_rows_of_a_table_are_whole_lines_without_a_terminal(doractl, folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    name = "team-a." + "r" * 100
    doractl("adapters", "publish", name, folder, "--tag", f"note={'x' * 200}")
    rows = doractl("adapters", "list").splitlines()
    assert len(rows) == 2 and rows[1].startswith(f"{name} ") and max(map(len, rows)) < 300
    assert f"note={'x' * 200}\n" in doractl("adapters", "show", name)
    assert max(map(len, doractl("top", "--count", "1").splitlines())) < 300


def test_the_help_lists_the_exit_codes(doractl):
    out = " ".join(doractl("--help").split())
    assert "64 usage" in out and "69 server unavailable" in out and "130 interrupted" in out


def test_a_refusal_prints_reason_and_violations(doractl, server):
    problems = [("n", "TOO_LARGE", "is 9"), ("top_p", "OUT_OF_RANGE", "is 2")]
    server.refuse_generate = [
        lambda c: fail(c, grpc.StatusCode.INVALID_ARGUMENT, "BAD", "two problems", problems)
    ]
    error = doractl("generate", "--token-ids", "1", code=1)
    assert error.splitlines() == [
        "doractl: INVALID_ARGUMENT (BAD): two problems",
        "  - n: is 9 [TOO_LARGE]",
        "  - top_p: is 2 [OUT_OF_RANGE]",
    ]


def test_options_may_stand_before_the_command(doractl, server, monkeypatch):
    monkeypatch.delenv("DORAD_TARGET")
    out = doractl("--target", server.target, "-o", "json", "adapters", "list")
    assert json.loads(out) == []


def test_durable_versions_are_shown(doractl, folder):
    out = doractl("adapters", "publish", "a", folder, "--durable")
    assert re.search(r"durable +yes", out)
    doractl("adapters", "publish", "a", folder, "--no-activate")
    assert re.search(r"durable +no", doractl("adapters", "show", "a@2"))
    header, *rows = [line.split() for line in doractl("adapters", "list").splitlines()]
    assert header[2:4] == ["ACTIVE", "DURABLE"] and rows[0][2:4] == ["yes", "yes"]
    assert "yes" not in rows[1]


def test_adapters_life(doractl, server, folder):
    out = doractl("adapters", "publish", "a", folder, "--tag", "step=3", "--tag", "note=[red]x[/x]")
    assert "a@1 (active)" in out and "note=[red]x[/x], step=3" in out
    published = json.loads(
        doractl("adapters", "publish", "a", folder, "--no-activate", "--keep-last", 2, "-o", "json")
    )
    assert server.publish_begins[-1].keep_last == 2
    assert published["version"] == 2 and not published["active"] and not published["durable"]
    assert doractl("adapters", "activate", "a@2").startswith("a@2 is active (before: version 1")
    rows = doractl("adapters", "list").splitlines()
    assert rows[0].split()[:3] == ["NAME", "VERSION", "ACTIVE"] and len(rows) == 3
    assert "4-16" in rows[1] and "yes" in rows[2]
    assert "norms 0.250" in doractl("adapters", "show", "a@1")
    assert "step=3" in doractl("adapters", "show", "a@1")
    assert doractl("adapters", "retire", "a@1", "--force").startswith("a@1 is retiring")
    error = doractl("adapters", "show", "a@1", code=1)
    assert "NOT_FOUND (ADAPTER_NOT_FOUND)" in error
    doractl("adapters", "publish", "b", "/on/server", "--server-side")
    assert server.images["b", 1][1] == b"/on/server"


def test_rolls_back_to_the_newest_ready_version_below_the_active_one(doractl, server, folder):
    for _ in range(4):
        doractl("adapters", "publish", "a", folder)
    server.versions["a", 3].state = types_pb2.ADAPTER_STATE_FAILED
    assert doractl("adapters", "rollback", "a").startswith("a@2 is active (before: version 4")
    done = json.loads(doractl("adapters", "rollback", "a", "-o", "json"))
    assert done["adapter"]["version"] == 1 and done["previous_version"] == 2
    assert "below the active one (1)" in doractl("adapters", "rollback", "a", code=1)
    assert doractl("adapters", "rollback", "a", "--to", "4").startswith("a@4 is active")
    assert "no adapter a@9" in doractl("adapters", "rollback", "a", "--to", "9", code=1)
    assert server.active == {"a": 4}
    assert "no adapter named 'b'" in doractl("adapters", "rollback", "b", code=1)
    doractl("adapters", "publish", "c", folder, "--no-activate")
    assert "no active version" in doractl("adapters", "rollback", "c", code=1)


def test_a_rollback_that_is_overtaken_fails(doractl, server, folder, monkeypatch):
    for _ in range(2):
        doractl("adapters", "publish", "a", folder)
    listing = dorad.Client.adapters

    def list_and_move(client, name):
        versions = listing(client, name)
        client.activate(name, 1)
        return versions

    monkeypatch.setattr(dorad.Client, "adapters", list_and_move)
    assert "GENERATION_MOVED" in doractl("adapters", "rollback", "a", code=1)


def test_every_answer_about_adapters_is_json_on_request(doractl, folder):
    def ask(*arguments):
        return json.loads(doractl("adapters", *arguments, "--output", "json"))

    assert ask("publish", "a", folder)["version"] == 1
    assert ask("publish", "a", folder)["active"]
    assert [version["version"] for version in ask("list")] == [1, 2]
    assert ask("show", "a")["version"] == 2
    assert ask("rollback", "a")["adapter"]["version"] == 1
    assert ask("activate", "a@2")["previous_version"] == 1
    assert ask("retire", "a@1")["state"] == "retiring"
    assert ask("watch", "--from", "0", "--count", "1")["type"] == "published"


def test_watch_prints_events(doractl, folder):
    doractl("adapters", "publish", "a", folder)
    out = doractl("adapters", "watch", "--from", "0", "--count", "2")
    assert [line.split() for line in out.splitlines()] == [
        ["1", "published", "a@1"],
        ["2", "activated", "a@1"],
    ]
    out = doractl("adapters", "watch", "--from", "0", "--count", "2", "-o", "json")
    assert [json.loads(line)["type"] for line in out.splitlines()] == ["published", "activated"]


def test_scores(doractl, folder):
    doractl("adapters", "publish", "a", folder)
    out = doractl("score", "--token-ids", "1,2,3", "-a", "a", "--base", "--per-token")
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["#", "ID", "TOKEN", "base", "a@1"]
    assert lines[3] == ["2", "3", "3", "-0.0300", "-0.0400"]
    assert lines[5][:4] == ["base", "2", "-0.0500", "-0.0250"]
    scores = json.loads(doractl("score", "--token-ids", "1,2", "-o", "json"))["scores"]
    assert scores[0]["logprobs"] == [None, pytest.approx(-0.02)]


def test_operates(doractl, server):
    assert "fake-model (llama)" in doractl("info")
    assert json.loads(doractl("info", "-o", "json"))["model"]["vocab_size"] == 1000
    assert doractl("pause", "--mode", "wait") == "paused (wait); 2 requests affected\n"
    assert "paused" in doractl("info")
    assert doractl("pause", "-a", "pirate") == "paused pirate (keep); 2 requests affected\n"
    assert doractl("resume", "-a", "pirate") == "resumed\n"
    assert doractl("resume") == "resumed\n"
    assert (
        doractl("limit-gpu-share", "0.25", "--for", "30") == "steps take at most 25% of the time\n"
    )
    assert server.gpu_share_requests[0].time_to_live.seconds == 30
    assert "25% of the time" in doractl("info")
    assert json.loads(doractl("limit-gpu-share", "0.5", "--id", "b", "-o", "json")) == {
        "gpu_share": 0.25
    }
    assert doractl("end-gpu-share-limit") == "ended; steps take at most 50% of the time\n"
    assert json.loads(doractl("end-gpu-share-limit", "--id", "b", "-o", "json")) == {
        "ended": True,
        "gpu_share": 1.0,
    }
    assert doractl("end-gpu-share-limit") == "no limit doractl; steps take all the time\n"
    assert doractl("abort", "r1", "r2") == "3 requests aborted\n"
    assert json.loads(doractl("abort", "--all", "-o", "json")) == {"aborted": 3}
    assert doractl("health") == "serving\n"
    server.health.set("", 2)
    doractl("health", code=69)


def test_top_shows_rates_from_the_metrics(doractl, folder):
    served = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            served.append(self.path)
            body = f"dorad_generated_tokens_total {100 * len(served)}\n".encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    try:
        doractl("adapters", "publish", "a", folder)
        url = f"http://127.0.0.1:{web.server_port}/metrics"
        out = doractl("top", "--metrics", url, "--count", "2", "--interval", "0.1", "-o", "json")
        first, second = [json.loads(line) for line in out.splitlines()]
        assert "generated tokens/s" not in first["rates"]
        assert 0 < second["rates"]["generated tokens/s"] < 1100
        frame = doractl("top", "--metrics", url, "--count", "1")
        assert "KV pages" in frame and "25%" in frame and "generation 2" in frame
    finally:
        web.shutdown()
        web.server_close()


def test_metrics_text_is_summed_by_name():
    text = (
        "# HELP x_total Help.\n# TYPE x_total counter\n"
        'x_total{a="1 } 2",b="c"} 3\nx_total{a="2"} 4.5 1700000000\n'
        'y_bucket{le="1"} 9\ny_sum 2\ny_count 4\nbroken\n'
    )
    assert parse_metrics(text) == {"x_total": 7.5, "y_sum": 2.0, "y_count": 4.0}


def test_rates_survive_a_restart_of_the_server():
    rates = Rates()
    name = "dorad_engine_step_seconds"
    assert rates.update({f"{name}_sum": 1.0, f"{name}_count": 10}, 0.0) == {}
    now = rates.update({f"{name}_sum": 3.0, f"{name}_count": 14}, 1.0)
    assert now["step ms"] == pytest.approx(500)
    assert "step ms" not in rates.update({f"{name}_sum": 0.1, f"{name}_count": 1}, 2.0)


# --- dorad-load -----------------------------------------------------------------------------------


@pytest.fixture
def dorad_load(server):
    def run(*arguments, code=0, want=""):
        arguments = ["--target", server.target, *map(str, arguments)]
        result = CliRunner().invoke(load_app, arguments, prog_name="dorad-load")
        assert result.exit_code == code, (result.output, result.exception)
        return result.stdout if want == "stdout" or not code else result.stderr

    return run


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
    assert report["itl_ms"]["p50"] >= 1.0 and report["ttft_ms"]["max"] > 0
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
    report = asyncio.run(load.run(server.target, plan, timeout=30))
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
        asyncio.run(load.run(server.target, plan, timeout=30))


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
    from dorad.load.plan import Lengths, Plan, Popularity, Source

    length, popularity = Lengths.parse("9"), Popularity.parse([], None)
    plan = Plan(length, length, popularity, rate=1.0, shared_prefix=6, seed=3)
    parts = [*plan.split(4), *plan.split(2)[1].split(2), plan]
    assert len({tuple(Source(part, 1000, {2}).next().token_ids[:6]) for part in parts}) == 1
    other = Source(dataclasses.replace(plan, seed=4), 1000, {2}).next()
    assert other.token_ids[:6] != Source(plan, 1000, {2}).next().token_ids[:6]


def test_a_plan_too_small_for_its_processes_is_refused(dorad_load, server):
    assert "concurrency" in dorad_load("-c", 1, "--processes", 2, code=64)


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
        assert wait_for(lambda: server.running == 1, 20)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130 and b"Traceback" not in stderr
    assert wait_for(lambda: server.running == 0)
