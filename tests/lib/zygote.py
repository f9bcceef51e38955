"""Programs of the Python client without their imports, which are most of a short program's time.

A process that has imported the client, a zygote, forks for each program. The fork runs the code
with its own arguments, environment and files, and ends as any Python program ends. Zygotes end with
the process that runs the tests.
"""

import contextlib
import functools
import gc
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import IO

CLIENT = ("dorad.cli.app", "dorad.cli.gateway", "dorad.gateway.serve", "dorad.load", "dorad.text")
PICTURES = (*CLIENT, "dorad.pictures", "transformers.models.auto.image_processing_auto", "torch")
TRAINING = ("torch", "dorad.train")
_NUMBER = struct.Struct("i")
_MAX_MESSAGE = 1 << 20


class Program:
    """A running Python program, as subprocess.Popen shows one. `line`: [python, "-c", code, …]."""

    def __init__(
        self,
        line: Sequence[object],
        *,
        imports: tuple[str, ...] = CLIENT,
        stdin: int = subprocess.DEVNULL,
        stdout: int | IO = subprocess.DEVNULL,
        stderr: int | IO = subprocess.DEVNULL,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.args = [str(word) for word in line]
        assert self.args[:2] == [sys.executable, "-c"], self.args
        self.returncode: int | None = None
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        with contextlib.ExitStack() as stack:
            null = os.open(os.devnull, os.O_RDWR)
            stack.callback(os.close, null)
            files = [null]
            if stdin == subprocess.PIPE:
                files[0], write = os.pipe()
                stack.callback(os.close, files[0])
                self.stdin = os.fdopen(write, "w")
            for file in (stdout, stderr):
                if file == subprocess.PIPE:
                    assert file is stdout
                    read, write = os.pipe()
                    stack.callback(os.close, write)
                    self.stdout = os.fdopen(read)
                    files.append(write)
                elif file == subprocess.DEVNULL:
                    files.append(null)
                else:
                    files.append(file if isinstance(file, int) else file.fileno())
            self._status, write = os.pipe()
            stack.callback(os.close, write)
            request = {
                "code": self.args[2],
                "arguments": self.args[3:],
                "environment": dict(os.environ if env is None else env),
                "folder": os.getcwd(),
            }
            _send(imports, json.dumps(request).encode(), [*files, write])
        self.pid = self._read(None)
        assert self.pid is not None

    def _read(self, timeout: float | None) -> int | None:
        """The next number that the zygote tells: the process id, then the exit status."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._status, selectors.EVENT_READ)
            if not selector.select(timeout):
                return None
        data = os.read(self._status, _NUMBER.size)
        if not data:
            raise RuntimeError("the zygote has ended")
        return _NUMBER.unpack(data)[0]

    def _finish(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            status = self._read(timeout)
            if status is not None:
                self.returncode = os.waitstatus_to_exitcode(status)
                os.close(self._status)
        return self.returncode

    def poll(self) -> int | None:
        return self._finish(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._finish(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    line: Sequence[object], *, env: Mapping[str, str] | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """A program from its start to its end, with what it wrote."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        program = Program(line, stdout=stdout, stderr=stderr, env=env)
        try:
            code = program.wait(timeout)
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait()
            raise
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess(program.args, code, stdout.read(), stderr.read())


_lock = threading.Lock()


@functools.cache
def _zygote(imports: tuple[str, ...]) -> tuple[socket.socket, subprocess.Popen]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    arguments = f"{theirs.fileno()}, {imports}"
    code = f"from lib.zygote import _serve; program = _serve({arguments}); exec(program)"
    path = os.pathsep.join(sys.path)
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": path},
    )
    theirs.close()
    return ours, process


def _send(imports: tuple[str, ...], request: bytes, files: list[int]) -> None:
    assert len(request) < _MAX_MESSAGE
    with _lock:
        socket.send_fds(_zygote(imports)[0], [request], files)


def _serve(number: int, imports: tuple[str, ...]) -> str:
    """The zygote's life. Returns in each fork, with the code that it is to run."""
    import importlib

    for name in imports:
        importlib.import_module(name)
    gc.freeze()  # what is imported is never garbage
    requests = socket.socket(fileno=number)
    statuses = dict[int, int]()  # by pidfd: whom to tell
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is requests:
                data, files, _, _ = socket.recv_fds(requests, _MAX_MESSAGE, 4)
                if not data:
                    os._exit(0)
                pid = os.fork()
                if pid == 0:
                    for left in (*statuses, *statuses.values(), files.pop()):
                        os.close(left)
                    selector.close()
                    requests.close()
                    return _begin(json.loads(data), files)
                status = files.pop()
                for file in files:
                    os.close(file)
                handle = os.pidfd_open(pid)
                statuses[handle] = status
                selector.register(handle, selectors.EVENT_READ, pid)
                os.write(status, _NUMBER.pack(pid))
            else:
                handle = key.fd
                selector.unregister(handle)
                status = statuses.pop(handle)
                # The other end may have closed.
                with contextlib.suppress(BrokenPipeError):
                    os.write(status, _NUMBER.pack(os.waitpid(key.data, 0)[1]))
                os.close(status)
                os.close(handle)


def _begin(request: dict, files: list[int]) -> str:
    for to, file in enumerate(files):
        os.dup2(file, to)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv[:] = ["-c", *request["arguments"]]
    return request["code"]
