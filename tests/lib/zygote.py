"""Programs without most of their start: a Python program without its imports, the server without
libtorch's registrations.

A zygote is a process that has done this once and forks for each program. The fork runs the program
with its own arguments, environment and files, and ends as any program ends. Zygotes end with the
process that runs the tests.
"""

import contextlib
import functools
import gc
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

CLIENT = ("dorad.cli.app", "dorad.cli.gateway", "dorad.gateway.serve", "dorad.load", "dorad.text")
PICTURES = (*CLIENT, "dorad.pictures", "transformers.models.auto.image_processing_auto", "torch")
TRAINING = ("torch", "dorad.train")
_NUMBER = struct.Struct("i")
_MAX_MESSAGE = 1 << 20


class Program:
    """A running program, as subprocess.Popen shows one. `line`: [python, "-c", code, …], or that of
    another program. `imports` are for Python. Thread-safe."""

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
        if self.args[0] == sys.executable:
            assert self.args[1] == "-c", self.args
            of = imports
        else:
            of = self.args[0]
        self._lock = threading.Lock()
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
            read, write = os.pipe()
            self._status = os.fdopen(read, "rb", buffering=0)
            stack.callback(os.close, write)
            environment = (os.environ if env is None else env).items()
            texts = [os.getcwd(), str(len(self.args)), *self.args]
            texts += [f"{name}={value}" for name, value in environment]
            _send(of, "".join(f"{text}\0" for text in texts).encode(), [*files, write])
        self.pid = self._read()

    def _read(self) -> int:
        """The next number that the zygote tells: the process id, then the exit status."""
        data = self._status.read(_NUMBER.size)
        if not data:
            raise RuntimeError("the zygote has ended")
        return _NUMBER.unpack(data)[0]

    def _finish(self, timeout: float | None) -> int | None:
        told = select.poll()
        told.register(self._status, select.POLLIN)
        if self.returncode is None and told.poll(None if timeout is None else timeout * 1000):
            with self._lock:
                if self.returncode is None:
                    self.returncode = os.waitstatus_to_exitcode(self._read())
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
            with contextlib.suppress(ProcessLookupError):  # it has just ended
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
def _zygote(of: str | tuple[str, ...]) -> tuple[socket.socket, subprocess.Popen]:
    """Of a program, or of Python programs with these imports."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    number = theirs.fileno()
    options = dict(pass_fds=[number], stdin=subprocess.DEVNULL)
    if isinstance(of, str):
        with tempfile.TemporaryDirectory(prefix="dorad-zygote-") as folder:
            library = Path(folder) / "zygote.so"
            source = Path(__file__).with_suffix(".c")
            subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
            env = os.environ | {"LD_PRELOAD": str(library)}
            process = subprocess.Popen([of, str(number)], env=env, **options)
            theirs.close()
            assert ours.recv(1), f"{of} is no zygote"
    else:
        code = f"from lib.zygote import _serve; program = _serve({number}, {of}); exec(program)"
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen([sys.executable, "-c", code], env=env, **options)
        theirs.close()
    return ours, process


def _send(of: str | tuple[str, ...], request: bytes, files: list[int]) -> None:
    assert len(request) < _MAX_MESSAGE
    with _lock:
        socket.send_fds(_zygote(of)[0], [request], files)


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
                    return _begin(data, files)
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


def _begin(request: bytes, files: list[int]) -> str:
    for to, file in enumerate(files):
        os.dup2(file, to)
        os.close(file)
    folder, count, *texts = request.decode().split("\0")[:-1]
    line, environment = texts[: int(count)], texts[int(count) :]
    os.environ.clear()
    os.environ.update(text.split("=", 1) for text in environment)
    os.chdir(folder)
    sys.argv[:] = line[1:2] + line[3:]
    return line[2]
