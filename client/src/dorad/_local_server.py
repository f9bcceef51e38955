"""A server of this host as a child process."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

_START_SECONDS = 600  # A large model loads for minutes.
_END_SECONDS = 45  # More than server.drain_timeout_seconds.
# It has threads of its own; those of libgomp would spin beside them.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


@contextmanager
def local_server(
    model: str | os.PathLike[str],
    settings: Mapping[str, object] | None = None,
    *,
    program: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Serves a model while the block runs; gives the server's address.

        with dorad.local_server("models/base") as target, dorad.Client(target) as client:
            ...

    The server listens on a free port of 127.0.0.1, without metrics. Its log goes to this process's
    standard error. It ends with the block.

    Args:
      model: the folder of the model.
      settings: keys of docs/reference/configuration.md, as "engine.kv_bytes": "8GiB".
      program: the server; default: DORAD_BINARY, or else `dorad` on PATH.
      environment: further variables of the server's environment.

    Raises:
      FileNotFoundError: there is no such program.
      RuntimeError: the server did not get ready; its log says why.
    """
    settings = {"server.metrics_listen": "", "log.level": "warning"} | dict(settings or {})
    server = ServerChild(serve_command(model, settings, program), environment)
    try:
        server.wait_until_ready()
        yield server.target
    finally:
        server.stop()


class ServerChild:
    """A server as a child process, from its start on. The owner ends it with `stop`. Thread-safe.

    Args:
      command: a command line that runs `dorad serve`.
      environment: further variables of its environment.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self._command = command
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | _ENVIRONMENT | dict(environment or {}),
        )
        self.target = ""
        self.metrics_url = ""
        """Empty without metrics."""

    def wait_until_ready(self) -> None:
        """Reads its addresses. Raises RuntimeError when it does not get ready."""
        too_late = threading.Timer(_START_SECONDS, self.process.kill)
        too_late.daemon = True
        too_late.start()
        lines = self.process.stdout or ()
        ready = next((line for line in lines if line.startswith("dorad ready")), "")
        too_late.cancel()
        if not ready:
            raise RuntimeError(f"the server did not start: {' '.join(self._command)}")
        addresses = dict(word.split("=", 1) for word in ready.split()[2:])
        self.target = addresses["grpc"]
        self.metrics_url = addresses.get("metrics", "")

    def stop(self) -> None:
        """Ends it: running requests may finish until server.drain_timeout_seconds."""
        self.process.terminate()
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def serve_command(
    model: str | os.PathLike[str],
    settings: Mapping[str, object],
    program: str | os.PathLike[str] | None = None,
) -> list[str]:
    """The command line that serves a model, on a port of 127.0.0.1 unless the settings differ."""
    command = [_program(program), "serve", "--model", os.fspath(model)]
    for key, value in ({"server.grpc_listen": "127.0.0.1:0"} | dict(settings)).items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        command += ["--set", f"{key}={text}"]
    return command


def _program(given: str | os.PathLike[str] | None) -> str:
    named = given or os.environ.get("DORAD_BINARY")
    path = os.fspath(named) if named else shutil.which("dorad")
    if path is None:
        raise FileNotFoundError(
            "no program `dorad`: install dorad-server, or set DORAD_BINARY to its path"
        )
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no program {path}")
    return path


def model_folder(name: str) -> str:
    """The files of a model that this host has loaded, by its folder or its name on the hub."""
    if os.path.isdir(name):
        return name
    from huggingface_hub import snapshot_download

    return str(snapshot_download(name, local_files_only=True))
