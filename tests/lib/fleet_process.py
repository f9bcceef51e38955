"""A process of a fleet: trainer or rollout worker. It may kill itself at a point of its work.

Commands come on stdin, one JSON object a line; answers and samples go to stdout likewise. Every
manifest that the process writes goes into the history beside the manifest first, with the time.
"""

import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import dorad
from dorad.fleet import manifest_store
from dorad.fleet.calls import ServerCalls
from dorad.fleet.coordinator import Coordinator

from lib.zygote import Program

POINTS = [
    *("manifest_begin", "manifest_end", "send_begin", "send_end", "fetch_begin", "fetch_end"),
    *("commit_begin", "commit_end", "activate_begin", "activate_end", "retire_begin"),
    "retire_end",
]
"""Where a process may die: before and after each of these steps."""
PROMPTS = [[17, 4, 99, 3, 250 + 7 * n, 8, 21] for n in range(6)]
MOST_TOKENS = 24
POLICIES = ["pin", "pin", "switch_keep_kv"]


# --- In the process of the tests ------------------------------------------------------------------


class Process:
    """The other end. `heard` is called with each line of the process, in a thread of its own.

    Thread-safe, but for `ask`.
    """

    def __init__(
        self,
        kind: str,
        manifest: pathlib.Path,
        lease: float,
        log: pathlib.Path,
        heard: Callable[["Process", dict[str, Any]], None],
    ) -> None:
        self.kind = kind
        self._heard = heard
        code = "from lib.fleet_process import main; main()"
        with log.open("a") as errors:
            self.program = Program(
                [sys.executable, "-c", code, manifest, lease],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.program.stdout is not None
        for line in self.program.stdout:
            if line.endswith("\n"):  # A killed process may leave half of one.
                self._heard(self, json.loads(line))
        self._heard(self, {"gone": True})

    def ask(self, **command: Any) -> None:
        """Nothing happens in a process that has ended."""
        assert self.program.stdin is not None
        with contextlib.suppress(OSError):
            self.program.stdin.write(json.dumps(command) + "\n")
            self.program.stdin.flush()

    def kill(self) -> None:
        self.program.kill()
        self.join()

    def join(self) -> None:
        """Waits for the end, and until everything was heard."""
        self.program.wait(60)
        self._reader.join(60)
        with contextlib.suppress(OSError):
            self.program.stdin.close()


# --- In the process itself ------------------------------------------------------------------------


class _Points:
    """Dies when it reaches the armed point, and leaves its name in a file."""

    def __init__(self, deaths: pathlib.Path) -> None:
        self._deaths = deaths
        self.armed = ""

    def reach(self, point: str) -> None:
        if point == self.armed:
            with self._deaths.open("a") as deaths:
                deaths.write(f"{point}\n")
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, owner: type, method: str, step: str) -> None:
        real: Callable[..., Awaitable[Any]] = getattr(owner, method)

        async def call(*args: Any) -> Any:
            self.reach(f"{step}_begin")
            result = await real(*args)
            self.reach(f"{step}_end")
            return result

        setattr(owner, method, call)


def _note_manifests(points: _Points) -> None:
    real = manifest_store.replace_file

    def replace(path: pathlib.Path, data: bytes) -> None:
        with open(f"{path}.history", "ab", buffering=0) as history:
            written = {"at": time.monotonic(), "manifest": json.loads(data)}
            history.write(json.dumps(written).encode() + b"\n")
            points.reach("manifest_begin")
            real(path, data)
            points.reach("manifest_end")
            history.write(json.dumps({"done": time.monotonic()}).encode() + b"\n")

    manifest_store.replace_file = replace


def _say(**line: Any) -> None:
    text = json.dumps(line) + "\n"
    with _saying:
        sys.stdout.write(text)
        sys.stdout.flush()


_saying = threading.Lock()


def _answer(fleet: dorad.Fleet, command: dict[str, Any]) -> None:
    number, what = command.pop("id"), command.pop("do")
    try:
        result = getattr(fleet, what)(**command)
    except dorad.DoradError as error:
        _say(id=number, error=type(error).__name__, message=str(error), reason=error.reason)
    else:
        version = (result.version, result.digest) if what == "publish" else None
        _say(id=number, version=version)


def _roll_out(fleet: dorad.Fleet, names: list[str], seed: int) -> None:
    """Prompts for all names, as long as the process lives. Each line: what they were answered."""
    draw = random.Random(seed)
    while True:
        name = draw.choice(names)
        began = time.monotonic()
        try:
            results = fleet.generate_many(
                PROMPTS,
                adapter=name,
                max_tokens=draw.choice([1, 4, MOST_TOKENS]),
                temperature=0.0,
                ignore_eos=True,
                in_flight_policy=draw.choice(POLICIES),
                timeout=90.0,
                retry_for=60.0,
            )
        except dorad.DoradError as error:
            _say(failed=type(error).__name__, message=str(error), name=name, began=began)
            time.sleep(0.05)
            continue
        ended = time.monotonic()
        samples = [
            {
                "prompt": n,
                "tokens": sample.token_ids.tolist(),
                "spans": [(span.adapter, span.version, span.digest) for span in sample.spans],
            }
            for n, result in enumerate(results)
            for sample in result
        ]
        _say(name=name, began=began, ended=ended, samples=samples)


def main() -> None:
    manifest, lease = sys.argv[1], float(sys.argv[2])
    points = _Points(pathlib.Path(f"{manifest}.deaths"))
    _note_manifests(points)
    points.around(ServerCalls, "send", "send")
    points.around(ServerCalls, "fetch", "fetch")
    points.around(ServerCalls, "activate", "activate")
    points.around(ServerCalls, "retire", "retire")
    points.around(Coordinator, "_commit", "commit")
    fleet = dorad.Fleet(manifest, lease=lease)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "die":
            points.armed = command["at"]
        elif command["do"] == "roll_out":
            arguments = (fleet, command["names"], command["seed"])
            threading.Thread(target=_roll_out, args=arguments, daemon=True).start()
        else:
            threading.Thread(target=_answer, args=(fleet, command), daemon=True).start()
    os._exit(0)  # The process of the tests has ended.
