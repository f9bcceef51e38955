"""doractl top beside a server that goes away and comes back."""

import json
import threading
import time

import pytest
import typer
from dorad.cli import top
from dorad.cli.app import app
from fake_server import FakeServer
from lib.server import free_port
from typer.testing import CliRunner


class Answering(FakeServer):
    """Knows whether it has answered."""

    def __init__(self, port):
        super().__init__(port=port)
        self.answered = threading.Event()

    def List(self, request, context):
        self.answered.set()
        return super().List(request, context)


class Clock:
    """The module `time` of top alone."""

    def __init__(self, sleep):
        self.sleep, self.monotonic = sleep, time.monotonic


@pytest.mark.parametrize("output", ["table", "json"])
def test_top_goes_on_when_the_server_restarts(monkeypatch, output):
    port = free_port()
    servers = [Answering(port), Answering(port)]
    servers[0].__enter__()
    looks = 0
    end = time.monotonic() + 60

    def between_looks(seconds):
        """After the first look the server is away for one look."""
        nonlocal looks
        looks += 1
        if looks == 1:
            servers[0].__exit__()
        elif looks == 2:
            servers[1].__enter__()
        elif servers[1].answered.is_set():
            raise typer.Exit
        assert time.monotonic() < end
        time.sleep(0.1)

    monkeypatch.setattr(top, "time", Clock(between_looks))
    words = ["top", "--target", f"127.0.0.1:{port}", "-o", output]
    try:
        result = CliRunner().invoke(app, words, prog_name="doractl")
    finally:
        servers[1].__exit__()
    assert result.exit_code == 0, (result.output, result.exception)
    if output == "json":
        lines = [json.loads(line) for line in result.stdout.splitlines()]
        assert "UNAVAILABLE" in lines[1]["unreachable"]
        assert lines[0]["info"] and lines[-1]["info"]
    else:
        assert "unreachable, retrying: UNAVAILABLE" in result.stdout
        assert result.stdout.count("fake-model") == 2


def test_a_server_that_never_answered_ends_top(doractl):
    assert "UNAVAILABLE" in doractl("top", "--target", "127.0.0.1:1", code=69)


def test_another_failure_than_absence_ends_top(doractl, server, monkeypatch):
    def deny(seconds):
        server.deny_info = "no more"

    monkeypatch.setattr(top, "time", Clock(deny))
    assert "no more" in doractl("top", code=1)
