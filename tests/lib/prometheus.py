"""A Prometheus of the tests' own: the distribution's program, its own data, a loopback port."""

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lib.server import free_port

START = 60.0


@dataclass
class Prometheus:
    process: subprocess.Popen
    url: str

    def get(self, path: str, **parameters: object):
        query = urllib.parse.urlencode(parameters)
        request = f"{self.url}{path}?{query}" if query else f"{self.url}{path}"
        try:
            with urllib.request.urlopen(request, timeout=20) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{request}: {error.read().decode()}") from None

    def query(self, expression: str, at: float | None = None) -> list[dict]:
        time_of = {} if at is None else {"time": at}
        return self.get("/api/v1/query", query=expression, **time_of)["result"]

    def query_range(self, expression: str, begin: float, end: float, step: float) -> list[dict]:
        return self.get("/api/v1/query_range", query=expression, start=begin, end=end, step=step)[
            "result"
        ]

    def is_ready(self) -> bool:
        try:
            urllib.request.urlopen(self.url + "/-/ready", timeout=5).close()
        except (urllib.error.URLError, OSError):
            return False
        return True


@contextmanager
def prometheus(config: Path, data: Path) -> Iterator[Prometheus]:
    """Runs until the end of the block, then is ended by its own pid."""
    program = shutil.which("prometheus")
    assert program, "the package prometheus is missing: tools/setup.sh installs it"
    address = f"127.0.0.1:{free_port()}"
    log = data.parent / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={config}",
                f"--storage.tsdb.path={data}",
                "--storage.tsdb.retention.time=30d",
                f"--web.listen-address={address}",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    running = Prometheus(process, f"http://{address}")
    try:
        deadline = time.monotonic() + START
        while not running.is_ready():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.05)
        yield running
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def write_config(path: Path, targets: list[str], interval: str = "1s", rules: str = "") -> Path:
    """A configuration as deploy/prometheus/prometheus.yml is one, with other targets."""
    listed = ", ".join(f'"{target}"' for target in targets)
    path.write_text(
        f"global: {{scrape_interval: {interval}, scrape_timeout: {interval}, "
        f"evaluation_interval: {interval}}}\n"
        f"rule_files: [{rules}]\n"
        "scrape_configs:\n"
        f"  - {{job_name: dorad, static_configs: [{{targets: [{listed}]}}]}}\n"
    )
    return path


def target_of(metrics_url: str) -> str:
    return urllib.parse.urlsplit(metrics_url).netloc


def finite(result: list[dict]) -> bool:
    """Whether an instant query has brought a number."""
    values = [float(series["value"][1]) for series in result]
    return any(value == value and abs(value) != float("inf") for value in values)
