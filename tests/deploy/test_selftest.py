"""The bundle's self-test (tools/selftest.py) with programs that only say how they ended."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from lib.server import ROOT

RUN = """#!/usr/bin/env bash
name=$1
for argument in "$@"; do
  case $argument in --gtest_output=json:*) report=${argument#--gtest_output=json:} ;; esac
done
here=$(dirname "$0")
if [[ -f $here/$name.json ]]; then cp "$here/$name.json" "$report"; fi
echo "$name says"
exit "$(cat "$here/$name.code" 2>/dev/null || echo 0)"
"""


def report_of(results: list[str]) -> str:
    tests = []
    for i, result in enumerate(results):
        test: dict = {"name": f"T{i}", "result": "SKIPPED" if result == "skip" else "COMPLETED"}
        if result == "fail":
            test["failures"] = [{"failure": "no"}]
        tests.append(test)
    return json.dumps({"testsuites": [{"name": "Suite", "testsuite": tests}]})


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "tools/selftest.py", tmp_path)
    (tmp_path / "run").write_text(RUN)
    (tmp_path / "run").chmod(0o755)
    (tmp_path / "COMMIT").write_text("abc123\n")
    for program in ("kernels_test", "cuda_test"):
        (tmp_path / f"{program}.json").write_text(report_of(["pass", "pass", "skip"]))
    return tmp_path


def selftest(bundle: Path) -> tuple[int, str]:
    only = ["kernels_test", "cuda_test", "kernels_norm_bench", "cuda_step_bench"]
    command = [sys.executable, bundle / "selftest.py", "--report", bundle / "out.md", "--only"]
    run = subprocess.run([*command, *only], capture_output=True, text=True, timeout=60)
    return run.returncode, (bundle / "out.md").read_text()


def test_all_is_well(bundle: Path) -> None:
    code, report = selftest(bundle)
    assert code == 0, report
    assert "* commit: abc123" in report
    assert "| kernels_test | 2 | 0 | 1 |" in report
    assert "```\nkernels_norm_bench says\n```" in report


def test_a_failed_test_is_named(bundle: Path) -> None:
    (bundle / "cuda_test.json").write_text(report_of(["pass", "fail"]))
    (bundle / "cuda_test.code").write_text("1")
    code, report = selftest(bundle)
    assert code == 1
    assert "| cuda_test | 1 | 1 | 0 |" in report
    assert "* cuda_test: failed: `Suite.T1`" in report


def test_a_crash_of_tests_is_bad_and_one_of_a_bench_is_told(bundle: Path) -> None:
    (bundle / "cuda_step_bench.code").write_text("134")
    code, report = selftest(bundle)
    assert code == 0
    assert "ended with 134: cuda_step_bench says" in report
    (bundle / "kernels_test.code").write_text("139")
    code, report = selftest(bundle)
    assert code == 1
    assert "* kernels_test: ended with 139: kernels_test says" in report
