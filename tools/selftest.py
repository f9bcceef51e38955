#!/usr/bin/env python3
"""The self-test of a bundle on a GPU host: the kernels' and the backend's tests, invariance and
fidelity against PEFT where Python has what they need, and benches. Writes one report in Markdown.

    dorad-bundle/run selftest [--report FILE] [--only NAME...] [--limit SECONDS]

Exit code 1 if a test fails or does not end. A bench that does not run (too little memory) is only
reported. Needs Python's standard library only.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
PROGRAMS = ("kernels_test", "cuda_test")
PYTHON = {
    "invariance": ("tests/golden/test_invariance.py", "bf16"),
    "fidelity": ("tests/golden/test_fidelity.py", "no_worse"),
}
PACKAGES = ("numpy", "torch", "transformers", "peft", "safetensors", "grpc", "pytest")
BENCHES = (
    ("kernels_linear_bench", "1", "32", "128"),
    ("kernels_norm_bench",),
    ("kernels_sampling_bench",),
    ("cuda_step_bench", "--batch", "1,32,128", "--adapters", "0,1"),
)
MOST_NAMED = 20  # failures of a program
NAMES = (*PROGRAMS, *PYTHON, *(bench[0] for bench in BENCHES))


class Outcome(NamedTuple):
    """Of tests. `note`: why there are no numbers."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: tuple[str, ...] = ()
    note: str = ""
    is_bad: bool = False


class Run(NamedTuple):
    code: int | None  # None: it did not end in time
    output: str


def run(command: list[str], limit: float, **environment: str) -> Run:
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=limit,
            env=os.environ | environment,
            cwd=HERE,
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        return Run(None, text)
    return Run(done.returncode, done.stdout)


def unfinished(result: Run, limit: float) -> Outcome:
    how = f"did not end in {limit:.0f} s" if result.code is None else f"ended with {result.code}"
    tail = " / ".join(result.output.strip().splitlines()[-3:])
    return Outcome(note=f"{how}: {tail}", is_bad=True)


def run_gtest(program: str, limit: float) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [str(HERE / "run"), program, f"--gtest_output=json:{report}"]
        result = run(command, limit)
        if result.code not in (0, 1) or not report.exists():
            return unfinished(result, limit)
        suites = json.loads(report.read_text())["testsuites"]
    tests = [(f"{s['name']}.{t['name']}", t) for s in suites for t in s["testsuite"]]
    failures = tuple(name for name, test in tests if test.get("failures"))
    skipped = sum(test["result"] == "SKIPPED" for _, test in tests)
    passed = len(tests) - len(failures) - skipped
    is_bad = bool(failures) or result.code != 0
    return Outcome(passed, len(failures), skipped, failures, is_bad=is_bad)


def run_pytest(file: str, expression: str, limit: float) -> Outcome:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        return Outcome(note=f"left out: Python lacks {', '.join(missing)}")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", str(HERE / "checks" / file)]
        command += ["-k", expression, f"--junitxml={report}"]
        binary = str(HERE / "dorad")
        result = run(command, limit, DORAD_BINARY=binary, DORAD_TEST_DEVICE="cuda")
        if result.code not in (0, 1) or not report.exists():
            return unfinished(result, limit)
        cases = list(ElementTree.parse(report).iter("testcase"))
    failures = tuple(
        case.get("name", "")
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    )
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - len(failures) - skipped
    return Outcome(passed, len(failures), skipped, failures, is_bad=result.code != 0)


def describe_host(commit: str) -> list[str]:
    query = "name,driver_version,compute_cap,memory.total"
    try:
        found = run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], 60)
        gpu = found.output.strip().splitlines()[0] if found.code == 0 else "none"
    except (FileNotFoundError, IndexError):
        gpu = "none"
    return [
        f"* commit: {commit}",
        f"* GPU (name, driver, compute capability, memory): {gpu}",
        f"* time: {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="selftest", description=__doc__.split("\n\n")[0])
    parser.add_argument("--report", type=Path, default=Path("selftest.md"))
    parser.add_argument("--only", nargs="*", choices=NAMES, default=NAMES, metavar="NAME")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for each program")
    options = parser.parse_args()
    commit = HERE / "COMMIT"
    lines = ["# Self-test of dorad", ""]
    lines += describe_host(commit.read_text().strip() if commit.exists() else "unknown")
    lines += ["", "## Tests", "", "| tests | passed | failed | skipped | seconds |"]
    lines += ["|---|---|---|---|---|"]
    bad = False
    details: list[str] = []
    for name in (*PROGRAMS, *PYTHON):
        if name not in options.only:
            continue
        print(f"{name} ...", flush=True)
        begin = time.monotonic()
        outcome = (
            run_gtest(name, options.limit)
            if name in PROGRAMS
            else run_pytest(*PYTHON[name], options.limit)
        )
        seconds = time.monotonic() - begin
        bad |= outcome.is_bad
        counts = f"{outcome.passed} | {outcome.failed} | {outcome.skipped} | {seconds:.0f}"
        lines.append(f"| {name} | {'– | – | – | –' if outcome.note else counts} |")
        if outcome.note:
            details.append(f"* {name}: {outcome.note}")
        details += [f"* {name}: failed: `{each}`" for each in outcome.failures[:MOST_NAMED]]
        if len(outcome.failures) > MOST_NAMED:
            details.append(f"* {name}: and {len(outcome.failures) - MOST_NAMED} more")
    lines += ["", *details] if details else []
    lines += ["", "## Benches"]
    for bench, *arguments in BENCHES:
        if bench not in options.only:
            continue
        print(f"{bench} ...", flush=True)
        result = run([str(HERE / "run"), bench, *arguments], options.limit)
        lines += ["", f"`{' '.join([bench, *arguments])}`", ""]
        if result.code == 0:
            lines += ["```", result.output.rstrip(), "```"]
        else:
            lines.append(unfinished(result, options.limit).note)
    report = options.report.absolute()
    report.write_text("\n".join(lines) + "\n")
    print(f"{report}: {'failures' if bad else 'all tests passed'}")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
