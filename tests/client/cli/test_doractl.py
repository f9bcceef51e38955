"""What all commands of doractl share: exit codes, errors, tables and options."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from dorad.cli.app import app
from fake_server import FakeServer, fail, overloaded
from lib.certificates import Authority
from typer.testing import CliRunner


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
        (["adapters", "check", "/nowhere", "-m", "/nowhere"], "no adapter folder /nowhere"),
        (["adapters", "check", "/nowhere"], "give the base model"),
        (["context", "lst"], "No such command 'lst'"),
    ],
)
def test_usage_errors_exit_with_64(doractl, arguments, words):
    error = doractl(*arguments, code=64)
    assert words in error and error.startswith("doractl: ") and len(error.splitlines()) <= 2


@pytest.mark.parametrize("group", [[], ["adapters"]])
def test_without_a_command_the_help_is_all_that_is_printed(group):
    result = CliRunner().invoke(app, group, prog_name="doractl")
    assert result.exit_code == 64 and "Usage: doractl" in result.output
    assert "doractl: " not in result.output and "Try" not in result.output


@pytest.mark.parametrize(
    ("target", "right"),
    [("http://127.0.0.1:50051", "127.0.0.1:50051"), ("localhost", "localhost:50051")],
)
def test_a_target_that_is_none_exits_with_64_and_the_one_that_was_meant(doractl, target, right):
    for arguments in (["info", "-t", target], ["-t", target, "generate", "--token-ids", "1"]):
        (line,) = doractl(*arguments, code=64).splitlines()
        assert line.startswith("doractl: the target") and f'give "{right}"' in line


def test_a_file_that_is_missing_is_told_by_its_path(doractl, tmp_path, monkeypatch):
    missing = tmp_path / "ca.pem"
    monkeypatch.setenv("DORAD_CA_FILE", str(missing))
    assert doractl("info", code=64) == f"doractl: {missing}: No such file or directory\n"


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


@pytest.mark.parametrize("environment", [None, "127.0.0.1:1"])
def test_options_may_stand_before_the_command(doractl, server, monkeypatch, environment):
    monkeypatch.delenv("DORAD_TARGET")
    if environment:  # The command line counts more.
        monkeypatch.setenv("DORAD_TARGET", environment)
    out = doractl("--target", server.target, "-o", "json", "adapters", "list")
    assert json.loads(out) == []
