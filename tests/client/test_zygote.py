"""lib.zygote: a forked program is what a started one would be."""

import subprocess
import sys

import pytest
from lib import zygote

SEEN = """
import atexit, os, sys, threading
atexit.register(print, "end")
print(__name__, sys.argv, os.environ.get("SEEN"), os.environ.get("PATH"), sys.stdin.read())
print(os.getcwd(), threading.active_count(), sorted(os.listdir("/proc/self/fd")))
sys.stderr.write("wrong")
sys.exit(3)
"""


SHELL = """
echo "$0 $1 $2" $# "$SEEN" "$PATH"
read line || echo no input
echo "$PWD"; (cd /proc/$$/fd && echo *)
printf wrong >&2
echo end; exit 3
"""


@pytest.mark.parametrize("program", [(sys.executable, "-c", SEEN), ("/bin/sh", "-c", SHELL)])
def test_it_sees_and_leaves_what_a_started_program_does(tmp_path, monkeypatch, program):
    monkeypatch.chdir(tmp_path)
    line, env = [*program, "a", "", "b c"], {"SEEN": "yes"}
    forked = zygote.run(line, env=env)
    started = subprocess.run(
        line, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert forked.returncode == started.returncode == 3
    assert forked.stdout == started.stdout and forked.stdout.endswith("end\n")
    assert forked.stderr == started.stderr == "wrong"


def test_exceptions_end_it_as_they_end_others():
    failed = zygote.run([sys.executable, "-c", "raise ValueError(7)"])
    assert failed.returncode == 1 and failed.stderr.endswith("ValueError: 7\n")


SLEEP = "import time; print('up', flush=True); time.sleep(300)"


@pytest.mark.parametrize(
    "line", [(sys.executable, "-c", SLEEP), ("/bin/sh", "-c", "echo up; exec sleep 300")]
)
def test_signals_end_it_as_they_end_others(line):
    first, second = (zygote.Program(line, stdout=subprocess.PIPE) for _ in range(2))
    assert first.stdout.readline() == second.stdout.readline() == "up\n"
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(0.01)
    first.terminate()
    assert first.wait(60) == -15 and second.poll() is None
    second.kill()
    assert second.wait(60) == -9
    second.kill()  # Too late, and not told to another process.
