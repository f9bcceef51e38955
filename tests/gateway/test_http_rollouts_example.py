"""client/examples/http_rollouts.py, as a user runs it."""

import re
import subprocess
import sys

from lib.gateway import running_gateway
from lib.server import ROOT, environment, serve

EXAMPLE = ROOT / "client" / "examples" / "http_rollouts.py"


def run(*words):
    line = [sys.executable, EXAMPLE, *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, env=environment())


def test_each_step_samples_from_the_adapter_that_was_loaded(zoo, tmp_path):
    root = zoo.copy_adapters("llama2", [("dora", 0), ("dora", 1)], tmp_path)
    with (
        serve(zoo.model("llama2")) as server,
        running_gateway(server.grpc, "--rl", "--adapter-root", root, scratch=tmp_path) as gateway,
    ):
        done = run("--url", gateway.url, "--tokens", 5, root / "dora-0", root / "dora-1")
        assert done.returncode == 0, done.stderr
        wrong = run("--url", gateway.url, tmp_path.parent)
    steps = re.split(r"(?m)^dora-\d: version (\d+), ", done.stdout)
    for version, text in ((steps[1], steps[2]), (steps[3], steps[4])):
        assert text.count(f"version {version}\n") == 12
    assert wrong.returncode == 1 and "adapter-root" in wrong.stderr
