"""QDoRA with bitsandbytes: its tests in an environment that has it. Every process that imports PEFT
imports bitsandbytes, too, so that `make test` leaves it out."""

import subprocess

from lib.server import ROOT, environment

TESTS = ["tests/client/train/test_quantised.py", "tests/integration/test_qdora.py"]


def test_norms_training_and_serving_over_quantised_bases():
    python = ROOT / ".cache" / "rl" / "qdora" / "bin" / "python"
    assert python.exists(), f"{python} does not exist: run `make test-rl`"
    line = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    result = subprocess.run(
        line, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=900
    )
    assert result.returncode == 0, result.stdout[-4000:]
    assert "bitsandbytes" not in result.stdout, result.stdout[-4000:]  # why it skips
