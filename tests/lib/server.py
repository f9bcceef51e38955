"""Starts the real binary, in tests as a fork (lib.zygote), waits for its ready line, and ends it by
its own pid.

DORAD_BINARY names another binary than build/dorad, DORAD_TEST_DEVICE its model.device,
DORAD_TEST_INSTRUCTION_SET its engine.instruction_set.
"""

import os
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lib import zygote
from lib.wire import Wire
from lib.zygote import Program

ROOT = Path(__file__).resolve().parents[2]
READY = re.compile(r"^dorad ready grpc=(\S+)(?: metrics=(\S+))?$")


def device() -> str:
    return os.environ.get("DORAD_TEST_DEVICE", "cpu")


def binary() -> Path:
    path = Path(os.environ.get("DORAD_BINARY", ROOT / "build" / "dorad"))
    assert path.exists(), f"{path} does not exist: run `make build` or set DORAD_BINARY"
    return path


def check_config(path: Path, scratch: Path) -> None:
    """That the server takes a file of deploy/, whose folders are another machine's."""
    changes = ["model.path=", f"adapters.store_path={scratch}/store"]
    line = [binary(), "check-config", path, *(part for c in changes for part in ("--set", c))]
    run = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


def environment(**changes: str) -> dict[str, str]:
    """Torch's own threads spin: one is plenty, the server has a thread team of its own."""
    return os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"} | changes


# Ports that the kernel picks.
PORTS = {"server.grpc_listen": "127.0.0.1:0", "server.metrics_listen": "127.0.0.1:0"}


def options(settings: Mapping[str, object]) -> list[str]:
    """Settings as --set options."""
    line = []
    for key, value in settings.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        line += ["--set", f"{key}={text}"]
    return line


def command(
    model: Path | str | None,
    adapters: Mapping[str, Path] | None = None,
    settings: Mapping[str, object] | None = None,
    config: Path | None = None,
) -> list[str]:
    """The command line; ports are picked by the kernel unless settings say otherwise."""
    values: dict[str, object] = PORTS | {"model.device": device()}
    if instruction_set := os.environ.get("DORAD_TEST_INSTRUCTION_SET"):
        values["engine.instruction_set"] = instruction_set
    if config is None:
        values["engine.kv_bytes"] = "1GiB"  # not a share of this machine's free memory
    values |= settings or {}
    line = [str(binary()), "serve"]
    line += ["--model", str(model)] if model is not None else []
    line += ["--config", str(config)] if config is not None else []
    line += options(values)
    for name, folder in (adapters or {}).items():
        line += ["--adapter", f"{name}={folder}"]
    return line


@dataclass
class Server:
    process: subprocess.Popen | Program
    log_path: Path
    grpc: str = ""
    metrics_url: str = ""
    wire: Wire = field(init=False, repr=False)

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def rss(self) -> int:
        """Resident bytes of the process."""
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def cpu_seconds(self) -> float:
        """CPU time of the process, of all its threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def metrics_text(self) -> str:
        with urllib.request.urlopen(self.metrics_url, timeout=10) as response:
            return response.read().decode()

    def metrics(self) -> dict[str, float]:
        """Every sample by its full name with labels."""
        return parse_metrics(self.metrics_text())

    def metric(self, name: str, **labels: str) -> float:
        """The sum over all label sets of a metric with these labels. Fails when it has none."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        values = [
            value
            for key, value in self.metrics().items()
            if (key == name or key.startswith(name + "{")) and all(text in key for text in wanted)
        ]
        assert values, f"{name} is not exported"
        return sum(values)

    def stop(self, timeout: float = 45.0) -> int:
        """SIGTERM, then the exit code. A server that does not end is killed and fails the test."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(
                f"no exit {timeout} s after SIGTERM\n{self.log()[-4000:]}"
            ) from None


def parse_metrics(text: str) -> dict[str, float]:
    samples = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            samples[name] = float(value)
    return samples


def is_idle(server: "Server") -> bool:
    """Whether no request holds anything of the server's."""
    engine = server.wire.info().engine
    return not (
        engine.running_sequences
        or engine.queued_requests
        or engine.kv_pages_used
        or engine.adapter_leases
    )


def free_port() -> int:
    """For programs that cannot say which port they were given."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_until(condition, timeout: float = 60.0, what: str = "condition"):
    """The first true value of condition()."""
    begin = time.monotonic()
    while True:
        value = condition()
        if value:
            return value
        waited = time.monotonic() - begin
        assert waited < timeout, f"not within {timeout} s: {what}"
        # A condition may cost as much as the work that it waits for.
        time.sleep(min(0.01 + waited / 8, 0.1))


def _can_fork(program: str) -> bool:
    """Not for a measurement, nor for a script, which a bundle's program is."""
    if "PYTEST_VERSION" not in os.environ or program != str(binary()):
        return False
    with binary().open("rb") as file:
        return file.read(4) == b"\x7fELF"


def run_line(line: list[str]) -> subprocess.CompletedProcess[str]:
    """A command of the binary from its start to its end."""
    if _can_fork(line[0]):
        return zygote.run(line, env=environment())
    return subprocess.run(line, capture_output=True, text=True, timeout=120, env=environment())


def start(line: list[str], log_path: Path, timeout: float = 60.0, **env: str) -> Server:
    """Runs a command line until its ready line. The caller stops the server."""
    with log_path.open("wb") as log:
        files = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log)
        if _can_fork(line[0]):
            process = Program(line, env=environment(**env), **files)
        else:
            process = subprocess.Popen(line, env=environment(**env), text=True, **files)
    server = Server(process, log_path)
    ready = threading.Event()

    def read() -> None:
        for text in process.stdout:
            match = READY.match(text.strip())
            if match:
                server.grpc, server.metrics_url = match.group(1), match.group(2) or ""
                ready.set()
        ready.set()

    threading.Thread(target=read, daemon=True).start()
    if not ready.wait(timeout) or not server.grpc:
        process.kill()
        process.wait()
        raise AssertionError(
            f"the server did not get ready\n{' '.join(line)}\n{server.log()[-4000:]}"
        )
    server.wire = Wire(server.grpc)
    return server


@contextmanager
def serve(
    model: Path,
    adapters: Mapping[str, Path] | None = None,
    settings: Mapping[str, object] | None = None,
    *,
    config: Path | None = None,
    timeout: float = 60.0,
    expect_exit: int | None = 0,
    **env: str,
) -> Iterator[Server]:
    """A running server. It must end with exit code `expect_exit` (None: any) on SIGTERM."""
    with tempfile.TemporaryDirectory(prefix="dorad-test-") as scratch:
        log_path = Path(scratch) / "server.log"
        server = start(command(model, adapters, settings, config), log_path, timeout, **env)
        try:
            yield server
        except BaseException:
            print(f"--- log of the server (exit code {server.process.poll()})")
            print(server.log()[-6000:])
            raise
        finally:
            server.wire.close()
            code = server.stop()
        assert expect_exit is None or code == expect_exit, (
            f"exit code {code}\n{server.log()[-4000:]}"
        )
