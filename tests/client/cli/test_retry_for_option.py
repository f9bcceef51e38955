"""The server of doractl's commands: its address, its limits of time."""

import threading

import pytest
from dorad.cli.app import app
from fake_server import FakeServer
from lib.server import free_port
from typer.testing import CliRunner


def run(*arguments, **environment):
    return CliRunner().invoke(app, [*arguments], prog_name="doractl", env=environment)


@pytest.mark.parametrize("given", ["before", "after", "environment"])
def test_a_command_waits_for_a_server_that_restarts(given):
    port = free_port()
    target = ["--target", f"127.0.0.1:{port}"]
    results = []

    def call():
        if given == "environment":
            results.append(run("info", *target, DORAD_RETRY_FOR="30"))
        elif given == "before":
            results.append(run("--retry-for", "30", "info", *target))
        else:
            results.append(run("info", *target, "--retry-for", "30"))

    command = threading.Thread(target=call)
    command.start()
    with FakeServer(port=port):
        command.join(30)
    assert results[0].exit_code == 0 and "fake-model" in results[0].stdout


def test_the_end_of_the_budget_is_one_line_that_names_it():
    result = run("info", "--target", f"127.0.0.1:{free_port()}", "--retry-for", "0.3")
    assert result.exit_code == 69
    (line,) = result.stderr.splitlines()
    assert "Connection refused" in line and "retry_for=0.3" in line


def test_zero_before_the_command_turns_retries_off():
    result = run("--retry-for", "0", "info", "--target", f"127.0.0.1:{free_port()}")
    assert result.exit_code == 69 and "attempt" not in result.stderr
