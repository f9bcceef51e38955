"""tools/test_summary.py: the result of a test run, with failed tests that ran a second time."""

import subprocess
import sys

import pytest
from lib.server import ROOT


def write(file, *, passed=(), failed=()):
    cases = [f'<testcase classname="t" name="{name}"/>' for name in passed]
    cases += [f'<testcase classname="t" name="{name}"><failure/></testcase>' for name in failed]
    file.write_text(f"<testsuite>{''.join(cases)}</testsuite>")


def summary(folder, *options):
    line = [sys.executable, ROOT / "tools" / "test_summary.py", folder, *options]
    result = subprocess.run(line, capture_output=True, text=True, timeout=60)
    return result.returncode, result.stdout


def test_a_test_that_passes_alone_counts_and_is_named(tmp_path):
    write(tmp_path / "python.xml", passed=["a"], failed=["b"])
    assert summary(tmp_path)[0] == 1
    write(tmp_path / "again.xml", passed=["b"])
    code, text = summary(tmp_path)
    assert code == 0 and "passed alone: t::b" in text and "OK: 2 tests" in text


def test_a_test_that_fails_twice_fails_the_run(tmp_path):
    write(tmp_path / "python.xml", passed=["a"], failed=["b", "c"])
    write(tmp_path / "again.xml", passed=["b"], failed=["c"])
    code, text = summary(tmp_path)
    assert code == 1 and "FAILED t::c" in text and "FAILED: 1 of 3" in text


@pytest.mark.parametrize(
    ("failed", "runs"),
    [([], False), (["b"], True), (["b", "c", "d"], True), (list("bcde"), False)],
)
def test_a_few_failures_deserve_a_second_run(tmp_path, failed, runs):
    write(tmp_path / "python.xml", passed=["a"], failed=failed)
    assert (summary(tmp_path, "--again")[0] == 0) == runs


def test_a_random_failure_gets_no_second_run(tmp_path):
    write(tmp_path / "python.xml", failed=["test_random_operations[3]"])
    assert summary(tmp_path, "--again")[0] == 1
