"""A TCP proxy on the loopback that is a bad network; the names are those of Toxiproxy's toxics."""

import contextlib
import random
import socket
import struct
import threading
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Toxic:
    """What happens to the bytes of a connection, in both directions."""

    latency: float = 0.0  # seconds before each piece goes on
    jitter: float = 0.0  # seconds more, at most
    bandwidth: float = 0.0  # bytes a second; 0: all there is
    slice: int = 0  # largest piece that goes on at once, of random size; 0: as it came
    # After so many bytes from the client the connection is reset (an RST), is closed, or brings
    # and takes nothing any more.
    reset_after: int = 0
    close_after: int = 0
    silent_after: int = 0


class BadNetwork:
    """Forwards connections to a server. Ends with everything that it has open."""

    def __init__(self, target: str, toxic: Toxic, seed: int = 1) -> None:
        host, _, port = target.rpartition(":")
        self._server = (host, int(port))
        self.toxic = toxic
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self.connections = 0
        self._closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.target = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "BadNetwork":
        return self

    def __exit__(self, *exc: object) -> None:
        self._closed.set()
        for end in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._server)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open += [client, server]
                self.connections += 1
            silent = threading.Event()
            for source, sink, up in ((client, server, True), (server, client, False)):
                threading.Thread(
                    target=self._pump, args=(source, sink, up, silent), daemon=True
                ).start()

    def _pump(
        self, source: socket.socket, sink: socket.socket, up: bool, silent: threading.Event
    ) -> None:
        toxic, passed = self.toxic, 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                for piece in self._slices(data):
                    if silent.is_set():
                        continue
                    time.sleep(self._delay(len(piece)))
                    sink.sendall(piece)
                    passed += len(piece)
                if not up:
                    continue
                if toxic.silent_after and passed >= toxic.silent_after:
                    silent.set()
                if toxic.reset_after and passed >= toxic.reset_after:
                    _reset(source)
                    _reset(sink)
                    return
                if toxic.close_after and passed >= toxic.close_after:
                    break
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _slices(self, data: bytes) -> list[bytes]:
        if not self.toxic.slice:
            return [data]
        pieces = []
        while data:
            with self._lock:
                size = self._random.randint(1, self.toxic.slice)
            pieces.append(data[:size])
            data = data[size:]
        return pieces

    def _delay(self, size: int) -> float:
        toxic = self.toxic
        with self._lock:
            jitter = self._random.random() * toxic.jitter
        return toxic.latency + jitter + (size / toxic.bandwidth if toxic.bandwidth else 0.0)


def _reset(end: socket.socket) -> None:
    """Closes with an RST instead of a FIN."""
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.close()
