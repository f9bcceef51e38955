"""Registers and shared memory of the kernels for every GPU: tools/kernel_limits.py."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from lib.server import ROOT

NVCC = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
pytestmark = pytest.mark.skipif(not Path(NVCC).exists(), reason="needs nvcc")


@pytest.mark.deep
@pytest.mark.timeout(1800)
def test_no_kernel_spills_more_than_some_addresses_on_any_target() -> None:
    run = subprocess.run(
        [sys.executable, ROOT / "tools/kernel_limits.py"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr + run.stdout
    assert len(run.stdout.splitlines()) > 2 + 15
