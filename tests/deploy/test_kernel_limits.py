"""Registers and shared memory of the kernels for every GPU: tools/kernel_limits.py."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from lib.server import ROOT

NVCC = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
pytestmark = pytest.mark.skipif(not Path(NVCC).exists(), reason="needs nvcc")


def table(*arguments: str) -> list[str]:
    run = subprocess.run(
        [sys.executable, ROOT / "tools/kernel_limits.py", *arguments],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr + run.stdout
    return run.stdout.splitlines()


@pytest.mark.parametrize(("unit", "kernels"), [("norm_gemm_mma", 5), ("linear_prefill_mma", 2)])
def test_the_widest_kernels_do_not_spill(unit: str, kernels: int) -> None:
    lines = table("--units", unit, "--targets", "86")
    assert lines[0].endswith("| sm_86 |")
    assert len(lines) == 2 + kernels


@pytest.mark.deep
@pytest.mark.timeout(1800)
def test_nothing_spills_on_any_target() -> None:
    assert len(table()) > 2 + 15
