"""dorad._ray.tied: a program that ends with the process that has started it."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import dorad
from lib.server import wait_until

TIED = Path(dorad.__file__).parent / "_ray" / "tied.py"
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-IS", sys.argv[1], str(os.getpid()), *sys.argv[2:]])
print(child.pid, flush=True)
child.wait()
"""


def runs(pid, program):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" and program in Path(f"/proc/{pid}/cmdline").read_text()
    except FileNotFoundError:
        return False


def test_it_dies_when_its_parent_is_killed():
    line = [sys.executable, "-c", PARENT, TIED, shutil.which("sleep"), "600.25"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        try:
            wait_until(lambda: runs(child, "600.25") and not runs(child, "tied"), what="its start")
            parent.kill()
            parent.wait(60)
            wait_until(lambda: not runs(child, "600.25"), what="its end")
        finally:
            parent.kill()
            if runs(child, "600.25"):
                os.kill(child, signal.SIGKILL)


def test_it_does_not_start_after_its_parent():
    run = subprocess.run(
        [sys.executable, TIED, "1", shutil.which("true")], capture_output=True, text=True
    )
    assert run.returncode == 1 and "the parent has ended" in run.stderr
