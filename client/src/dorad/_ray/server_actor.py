"""A Ray actor that owns one `dorad serve` child."""

from __future__ import annotations

import collections
import os
import pathlib
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray

from dorad._local_server import ServerChild, serve_command

DEATHS_SECONDS = 600.0
"""The deaths of the last ten minutes count."""

_PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")

_TIED = pathlib.Path(__file__).with_name("tied.py")
"""The child dies with its actor, also when that one is killed: another actor would find its GPU's
memory and its store taken."""


@dataclass(frozen=True)
class ServerSpec:
    """What every server of a fleet is."""

    model: str
    settings: Mapping[str, object]
    """Keys of docs/reference/configuration.md."""
    environment: Mapping[str, str]
    program: str | None
    cpus: float
    gpus: float
    folder: str
    """On each node: the manifest's journal, and the servers' stores."""
    max_restarts: int


@dataclass(frozen=True)
class ServerState:
    """A server of a fleet, as its actor sees it."""

    number: int
    """Of the fleet's servers, from 0 on. A server that takes another one's place has its number."""
    state: str
    """"starting", "running", "stopped", or "failed": it is not started again."""
    target: str = ""
    """Its address. It has another one after each start."""
    metrics_url: str = ""
    pid: int = 0
    node: str = ""
    """The address of its node."""
    actor_id: str = ""
    """As `ray logs actor --id` takes it."""
    log: str = ""
    """A file on its node, where its log is."""
    restarts: int = 0
    """Of the child, by this actor."""
    reason: str = ""
    """Why the server was started the last time, or why it failed. Empty at first."""


class ServerActor:
    """Starts the server, and starts it again when it dies. Runs as an actor with threads.

    Args:
      fleet: the actor of the fleet, which hears of each start.
    """

    def __init__(self, fleet: Any, number: int, spec: ServerSpec) -> None:
        self._fleet = fleet
        self._spec = spec
        self._folder = pathlib.Path(spec.folder, f"server-{number}")
        self._changed = threading.Condition()
        self._child: ServerChild | None = None
        self._stopping = False
        context = ray.get_runtime_context()
        self._state = ServerState(
            number,
            "starting",
            node=ray.util.get_node_ip_address(),
            actor_id=context.get_actor_id() or "",
            log=os.readlink("/proc/self/fd/2"),
        )
        if context.was_current_actor_reconstructed:
            self._set(reason="Ray has restarted the actor: it had died, or its node")
        self._running = threading.Thread(target=self._run, daemon=True)
        self._running.start()

    # --- Calls of the fleet's actor ---------------------------------------------------------------

    def state(self) -> ServerState:
        return self._state

    def settled(self) -> ServerState:
        """Waits until the server runs and is a member, or has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._state.state != "starting")
            return self._state

    def stop(self) -> None:
        """Drains the server, ends it, and removes its store."""
        with self._changed:
            self._stopping = True
            child = self._child
            self._changed.notify_all()
        if child is not None:
            child.stop()
        self._running.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- The thread -------------------------------------------------------------------------------

    def _set(self, **changes: Any) -> None:
        with self._changed:
            self._state = replace(self._state, **changes)
            self._changed.notify_all()

    def _run(self) -> None:
        deaths: collections.deque[float] = collections.deque()
        while True:
            served = False
            child = None
            try:
                child = self._begin()
                if child is None:
                    break
                child.wait_until_ready()
                served = True
                self._announce(child)
                reason = _how_it_ended(child.process.wait())
            except Exception as error:
                reason = f"{error}{self._last_words()}"
                if child is not None:
                    child.stop()
            if self._stopping:
                break
            now = time.monotonic()
            deaths.append(now)
            while deaths[0] < now - DEATHS_SECONDS:
                deaths.popleft()
            print(f"server {self._state.number}: {reason}", file=sys.stderr, flush=True)
            first = self._state.restarts == 0 and not self._state.reason
            if len(deaths) > self._spec.max_restarts or (first and not served):
                self._set(state="failed", reason=reason, pid=0)
                return
            self._set(
                state="starting", reason=reason, restarts=self._state.restarts + 1, target="", pid=0
            )
        self._set(state="stopped", target="", pid=0)

    def _begin(self) -> ServerChild | None:
        """Starts the child, unless the actor shall stop."""
        node = self._state.node
        settings = {
            "server.grpc_listen": f"{node}:0",
            "server.metrics_listen": f"{node}:0",
            "log.level": "warning",
            "peers.allowed": f"[{', '.join((*_PRIVATE, node))}]",
            "adapters.store_path": self._folder / "store",
        } | dict(self._spec.settings)
        self._folder.mkdir(parents=True, exist_ok=True)
        command = serve_command(self._spec.model, settings, self._spec.program)
        tied = [sys.executable, "-IS", str(_TIED), str(os.getpid()), *command]
        with self._changed:
            if self._stopping:
                return None
            self._child = ServerChild(tied, self._spec.environment)
            return self._child

    def _announce(self, child: ServerChild) -> None:
        joined = self._fleet.joined.options(max_task_retries=-1)  # Ray may be restarting it.
        ray.get(joined.remote(self._state.number, child.target))
        self._set(
            state="running",
            target=child.target,
            metrics_url=child.metrics_url,
            pid=child.process.pid,
        )

    def _last_words(self) -> str:
        """The end of the log, which is this process's standard error."""
        try:
            with open(self._state.log, "rb") as log:
                log.seek(max(0, os.path.getsize(self._state.log) - 2000))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:  # It is not a file.
            return ""
        return f"; its log ends: {lines[-1]}" if lines else ""


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"the server was ended by {signal.Signals(-code).name}"
    return f"the server ended with code {code}"
