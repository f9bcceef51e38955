"""Starts the real gateway as a process of its own, and ends it by its own pid."""

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lib.server import environment
from lib.zygote import CLIENT, Program, run

READY = re.compile(r"^dorad (?:gateway|endpoint-picker) ready(?: http=(\S+))?(?: grpc=(\S+))?$")
_MAIN = "from dorad.cli import main; main()"
# The clock of the gateway's event loop. SIGUSR1 puts it forward, and wakes the loop.
CLOCK_STEP = 400.0
_STEPPED_CLOCK = f"""
import asyncio, signal, time
steps = []
asyncio.BaseEventLoop.time = lambda self: time.monotonic() + {CLOCK_STEP} * len(steps)
signal.signal(signal.SIGUSR1, lambda *_: steps.append(1))
"""


@dataclass
class RunningGateway:
    process: Program
    http: str
    grpc: str
    log_path: Path

    @property
    def url(self) -> str:
        return f"http://{self.http}"

    def log(self) -> list[dict]:
        """Every line of the log so far. None is anything but JSON."""
        return [json.loads(line) for line in self.log_path.read_text().splitlines()]

    def step_clock(self) -> None:
        """Puts the clock forward by CLOCK_STEP seconds, if it is stepped."""
        self.process.send_signal(signal.SIGUSR1)


def command(
    target: str | Sequence[str],
    *arguments: object,
    stepped_clock: bool = False,
    program: str = "gateway",
) -> list[str]:
    main = (_STEPPED_CLOCK if stepped_clock else "") + _MAIN
    targets = [target] if isinstance(target, str) else target
    line = [sys.executable, "-c", main, program]
    line += [word for target in targets for word in ("--target", target)]
    return [*line, "--listen", "127.0.0.1:0", *map(str, arguments)]


def ended_gateway(
    target: str | Sequence[str], *arguments: object, program: str = "gateway", **env: str
) -> subprocess.CompletedProcess[str]:
    """One that ends by itself, with what it wrote."""
    return run(command(target, *arguments, program=program), env=environment(**env), timeout=60)


@contextmanager
def running_gateway(
    target: str | Sequence[str],
    *arguments: object,
    scratch: Path,
    stepped_clock: bool = False,
    imports: tuple[str, ...] = CLIENT,
    program: str = "gateway",
    **env: str,
) -> Iterator[RunningGateway]:
    """It must end with exit code 0 on SIGTERM, and must not have logged an exception.

    imports: what it has imported before its start, so that it takes less time (lib.zygote).
    program: "gateway" or "endpoint-picker".
    """
    log_path = scratch / f"{program}.log"
    with log_path.open("wb") as log:
        process = Program(
            command(target, *arguments, stepped_clock=stepped_clock, program=program),
            imports=imports,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment(**env),
        )
    try:
        line = process.stdout.readline().strip()
        match = READY.match(line)
        assert match, f"no ready line but {line!r}\n{log_path.read_text()}"
        yield RunningGateway(process, match.group(1) or "", match.group(2) or "", log_path)
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


async def stream_tokens(address: str, body: dict) -> list[int]:
    """The token ids of a streamed completion of one choice. Its stream must have ended in order."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n"
    writer.write(
        f"{head}content-type: application/json\r\nconnection: close\r\n\r\n".encode() + data
    )
    tokens, done = list[int](), False
    async for line in reader:
        if line.startswith(b"data: [DONE]"):
            done = True
        elif line.startswith(b"data: "):
            event = json.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                tokens += choice["token_ids"]
    writer.close()
    assert done, "the stream ended early"
    return tokens
