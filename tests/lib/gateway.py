"""Starts the real gateway as a process of its own, and ends it by its own pid."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lib.server import environment

READY = re.compile(r"^dorad gateway ready http=(\S+)(?: grpc=(\S+))?$")
_MAIN = "from dorad.cli import main; main()"


@dataclass
class RunningGateway:
    process: subprocess.Popen
    http: str
    grpc: str

    @property
    def url(self) -> str:
        return f"http://{self.http}"


def command(target: str, *arguments: object) -> list[str]:
    line = [sys.executable, "-c", _MAIN, "gateway", "--target", target]
    return [*line, "--listen", "127.0.0.1:0", *map(str, arguments)]


@contextmanager
def running_gateway(
    target: str, *arguments: object, scratch: Path, **env: str
) -> Iterator[RunningGateway]:
    """It must end with exit code 0 on SIGTERM, and must not have logged an exception."""
    log_path = scratch / "gateway.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command(target, *arguments),
            stdout=subprocess.PIPE,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=environment(**env),
            text=True,
        )
    try:
        line = process.stdout.readline().strip()
        match = READY.match(line)
        assert match, f"no ready line but {line!r}\n{log_path.read_text()}"
        yield RunningGateway(process, match.group(1), match.group(2) or "")
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError("no exit 30 s after SIGTERM") from None
        finally:
            process.stdout.close()
    logged = log_path.read_text()
    assert code == 0, logged
    assert "Traceback" not in logged, logged
