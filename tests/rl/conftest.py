"""Acceptance tests with the libraries' own packages: `make test-rl`, not `make test`.

Each library has an environment of its own, .cache/rl/NAME (tools/test_rl.sh). A test starts the
server and the gateway, and runs a program with the library's code there: drive_NAME.py.
"""

import json
import os
import signal
import subprocess
from contextlib import contextmanager
from pathlib import Path

import dorad
import pytest
from lib.gateway import running_gateway
from lib.server import ROOT, environment, serve

if not os.environ.get("DORAD_RL"):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def folder(zoo):
    return zoo.model_with_tokenizer("slow")


@pytest.fixture(scope="session")
def server(folder):
    with serve(folder) as running:
        yield running


@pytest.fixture(scope="session")
def client(server):
    with dorad.Client(server.grpc, timeout=300) as it:
        yield it


@pytest.fixture(scope="session")
def adapters(zoo, tmp_path_factory):
    """A root with perturbed adapters: dora-0, dora-1, lora-0 and so on."""
    kinds = (("dora", 0), ("dora", 1), ("lora", 0), ("lora", 1), ("lora", 2))
    return zoo.copy_adapters("slow", kinds, tmp_path_factory.mktemp("adapters"))


@pytest.fixture
def gateway(server, folder, adapters, tmp_path):
    """Starts gateways with further options."""

    def started(*options):
        arguments = ["--rl", "--adapter-root", adapters, "--tokenizer", folder, *options]
        return running_gateway(server.grpc, *arguments, scratch=tmp_path)

    return started


@contextmanager
def driver(name: str, *arguments: object):
    """The program of a library. Give it lines; `result` is its last line as JSON.

    A library may have several, NAME_PART.
    """
    python = ROOT / ".cache" / "rl" / name.partition("_")[0] / "bin" / "python"
    assert python.exists(), f"{python} does not exist: run `make test-rl`"
    program = Path(__file__).with_name(f"drive_{name}.py")
    process = subprocess.Popen(
        [python, program, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(
            HF_HUB_OFFLINE="1",
            PYTHONPATH=str(ROOT / "client/src"),
            RAY_AUTH_MODE="disabled",
            RAY_USAGE_STATS_ENABLED="0",
        ),
        text=True,
        start_new_session=True,  # Ray's processes are in its group.
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def result(process: subprocess.Popen, timeout: float = 280) -> dict:
    output, _ = process.communicate(timeout=timeout)
    assert process.returncode == 0, output
    return json.loads(output.splitlines()[-1])


@pytest.fixture(scope="session")
def drive():
    return driver


@pytest.fixture(scope="session")
def result_of():
    return result
