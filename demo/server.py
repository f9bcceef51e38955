"""Starts build/dorad for the demo, waits for its ready line, and ends it by its own pid."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from cache import ROOT
from ui import fail

BINARY = Path(os.environ.get("DORAD_BINARY", ROOT / "build" / "dorad"))
READY = re.compile(r"^dorad ready grpc=(?P<grpc>\S+)(?: metrics=(?P<metrics>\S+))?$")


class Server:
    """A running server; leaving the `with` block stops it. Log: build/logs/demo-server.log."""

    def __init__(self, model: Path, adapters: Mapping[str, Path], timeout: float = 120.0) -> None:
        if not BINARY.exists():
            fail(f"{BINARY} does not exist: run `make build`")
        self.log = ROOT / "build" / "logs" / "demo-server.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.command = [str(BINARY), "serve", "--model", str(model)]
        for key in ("grpc_listen", "metrics_listen"):
            self.command += ["--set", f"server.{key}=127.0.0.1:0"]
        for name, folder in adapters.items():
            self.command += ["--adapter", f"{name}={folder}"]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # The server has threads of its own; libtorch's would spin beside them.
                env=os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
            )
        self.grpc = self.metrics = ""
        self._ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        if not self._ready.wait(timeout) or not self.grpc:
            self._process.kill()
            self._process.wait()
            self._fail("the server did not get ready")

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if match := READY.match(line.strip()):
                self.grpc, self.metrics = match["grpc"], match["metrics"] or ""
                self._ready.set()
        self._ready.set()

    def _fail(self, what: str) -> None:
        tail = self.log.read_text(errors="replace").splitlines()[-10:]
        fail("\n".join([f"{what} (log: {self.log.relative_to(ROOT)}, its end:)", *tail]))

    def wait(self) -> None:
        """Until the server ends by itself."""
        self._process.wait()

    def stop(self, timeout: float = 45.0) -> int:
        """SIGTERM, then the exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        code = self.stop()
        if code != 0 and kind is None:
            self._fail(f"the server ended with exit code {code}")
