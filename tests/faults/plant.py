#!/usr/bin/env python3
"""Plants faults, one at a time, and shows which test catches each: a test of the tests.

    .venv/bin/python tests/faults/plant.py            # all of tests/faults/planted.py
    .venv/bin/python tests/faults/plant.py min_tokens # those whose name or file contains the text
    .venv/bin/python tests/faults/plant.py --list

Works in build/faults/tree, a copy of the working tree: your files stay as they are. Builds what a
fault needs and runs its unit programs; if none of them fails, its selection of pytest. In the end
the tests that caught something run without a fault: they must pass. Prints a Markdown table.

Exit code 1: a fault was not caught, does not build, or does not fit its file any more.
JOBS is the number of compilers, DORAD_FAULTS_SECONDS the limit of one program (default 900).
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from faults.fault import Fault  # noqa: E402
from faults.planted import FAULTS  # noqa: E402

SCRATCH = ROOT / "build" / "faults"
TREE = SCRATCH / "tree"
LOG = SCRATCH / "log.txt"
SECONDS = int(os.environ.get("DORAD_FAULTS_SECONDS", "900"))
EMULATION = "emulation_"


class Unusable(Exception):
    """A fault or a test cannot be judged: it does not fit, does not build or does not run."""


def run(command: list[str], **environment: str) -> tuple[int, str]:
    """Runs a command in the copy. Returns its exit code, -1 when its time is over, and its output,
    which also goes to the log."""
    ours = {k: v for k, v in os.environ.items() if k != "DORAD_DEEP"}
    ours |= {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "PYTHONPATH": str(TREE / "client" / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "DORAD_BINARY": str(TREE / "build" / "dorad"),
        **environment,
    }
    with LOG.open("a") as log:
        begin = log.tell()
        print("$", " ".join(command), file=log, flush=True)
        process = subprocess.Popen(
            command,
            cwd=TREE,
            env=ours,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        code = -1
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(SECONDS)
        finally:  # Also compilers and servers that it has left.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    with LOG.open(errors="replace") as log:
        log.seek(begin)
        return code, log.read()


# --- The copy. ------------------------------------------------------------------------------------


def copy_tree() -> None:
    """Makes the copy equal to the working tree. Files that are equal keep their times."""
    TREE.mkdir(parents=True, exist_ok=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    names = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    manifest = SCRATCH / "manifest.txt"
    before = set(manifest.read_text().splitlines()) if manifest.exists() else set()
    for name in before - names:
        (TREE / name).unlink(missing_ok=True)
    for name in names:
        source, to = ROOT / name, TREE / name
        content = source.read_bytes()
        if not to.is_file() or to.read_bytes() != content:
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(content)
            to.chmod(source.stat().st_mode)
    manifest.write_text("\n".join(sorted(names)))
    for shared in (".venv", ".cache"):  # Packages, and models that the tests have made.
        (ROOT / shared).mkdir(exist_ok=True)
        if not (TREE / shared).exists():
            (TREE / shared).symlink_to(ROOT / shared)


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    path = TREE / fault.file
    text = path.read_text()
    if text.count(fault.old) != 1:
        raise Unusable(f"the old text occurs {text.count(fault.old)} times in {fault.file}")
    path.write_text(text.replace(fault.old, fault.new))
    try:
        yield
    finally:
        path.write_text(text)


# --- Building and testing. ------------------------------------------------------------------------


def build(targets: list[str]) -> None:
    """Programs by name: "engine_test", "dorad". Emulation has a folder of its own, with CUDA."""
    emulated = [target for target in targets if target.startswith(EMULATION)]
    others = [target for target in targets if target not in emulated]
    for folder, wanted in (("build", others), ("build-cuda", emulated)):
        if not wanted:
            continue
        no_cuda = "" if wanted is emulated else "1"
        code, output = run(["tools/build.sh", folder, *wanted], DORAD_NO_CUDA=no_cuda)
        if code:
            errors = re.findall(r".*error:.*", output)
            raise Unusable(f"does not build: {errors[0] if errors else LOG}")


def path_of(program: str) -> str:
    if program.startswith(EMULATION):
        return f"build-cuda/tests/emulation/{program}"
    return f"build/tests/unit/{program}"


def failed_unit(program: str, tests: str) -> str:
    """The first test of a unit program that fails; "": none."""
    code, output = run(
        [path_of(program), f"--gtest_filter={tests}", "--gtest_fail_fast", "--gtest_color=no"]
    )
    if code == 0:
        if "[  PASSED  ] 0 tests" in output:
            raise Unusable(f"{program} has no tests {tests}")
        return ""
    failed = re.findall(r"^\[  FAILED  \] ([\w./]+)", output, re.MULTILINE)
    if failed:
        return f"{program} {failed[0]}"
    begun = re.findall(r"^\[ RUN      \] ([\w./]+)", output, re.MULTILINE)
    if not begun:
        raise Unusable(f"{program} does not run: exit code {code}")
    return f"{program} {begun[-1]} ({'hangs' if code == -1 else 'crashes'})"


def failed_python(selection: Sequence[str]) -> str:
    """The first Python test that fails; "": none."""
    tests = [f"tests/{test}" for test in selection]
    code, output = run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    )
    if code == 0:
        return ""
    failed = re.findall(r"^(?:FAILED|ERROR) (tests/\S+::.+?)(?: - .*)?$", output, re.MULTILINE)
    if code != 1 or not failed:
        raise Unusable(f"pytest ends with {code}, see {LOG}")
    return failed[0]


def catcher(fault: Fault) -> str:
    """The test that notices the planted fault; "": none. The named tests of a unit program run
    before the rest of it."""
    for unit in fault.units:
        room, _, named = unit.partition(":")
        build([f"{room}_test"])
        for tests in (named, "*") if named else ("*",):
            if found := failed_unit(f"{room}_test", tests):
                return found
    if not fault.tests:
        return ""
    if not fault.file.startswith("client/") or any(
        not test.startswith("client/") for test in fault.tests
    ):
        build(["dorad"])
    return failed_python(fault.tests)


def passes(caught_by: str) -> bool:
    """Whether a test that caught a fault passes without one."""
    if caught_by.startswith("tests/"):
        build(["dorad"])  # The last one may have had a fault.
        return not failed_python([caught_by.removeprefix("tests/")])
    program, test = caught_by.split()[:2]
    build([program])
    return not failed_unit(program, test)


# --- Everything. ----------------------------------------------------------------------------------


def commit() -> str:
    short = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    dirty = ["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"]
    number = subprocess.run(short, capture_output=True, text=True, check=True).stdout.strip()
    changed = subprocess.run(dirty, capture_output=True, text=True, check=True).stdout
    return number + (" with changes" if changed else "")


def main() -> int:
    parser = argparse.ArgumentParser(description="Plants faults and shows what catches them.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="part of a fault's name or file")
    parser.add_argument("--list", action="store_true", help="only list the faults")
    arguments = parser.parse_args()
    faults = [
        fault
        for fault in FAULTS
        if not arguments.names or any(n in fault.name or n in fault.file for n in arguments.names)
    ]
    if not faults:
        parser.error("no fault has such a name or file")
    if arguments.list:
        for fault in faults:
            print(f"{fault.name}\n    {fault.file}\n    {fault.breaks}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ends what runs.
    SCRATCH.mkdir(parents=True, exist_ok=True)
    LOG.write_text("")
    copy_tree()
    run([sys.executable, "client/generate.py", "--if-stale"])
    print(
        f"Commit {commit()}.\n\n| fault | file | caught by | seconds |\n|---|---|---|---|",
        flush=True,
    )
    bad, caught = 0, set()
    for fault in faults:
        start = time.monotonic()
        try:
            with planted(fault):
                found = catcher(fault)
            caught |= {found} - {""}
            bad += not found
            text = f"`{found}`" if found else "**nothing**"
        except Unusable as why:
            bad += 1
            text = f"**{why}**"
        seconds = time.monotonic() - start
        print(f"| {fault.name} | `{fault.file}` | {text} | {seconds:.0f} |", flush=True)
    unstable = [test for test in sorted(caught) if not passes(test)]
    print(f"\n{len(faults) - bad} of {len(faults)} faults were caught.")
    for test in unstable:
        print(f"{test} fails without a fault, too")
    return 1 if bad or unstable else 0


if __name__ == "__main__":
    sys.exit(main())
