"""A TCP proxy on the loopback that is a bad network; the names are those of Toxiproxy's toxics."""

import contextlib
import itertools
import random
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Toxic:
    """What happens to the bytes of a connection, in both directions."""

    latency: float = 0.0  # seconds before each piece goes on
    jitter: float = 0.0  # seconds more, at most
    bandwidth: float = 0.0  # bytes a second; 0: all there is
    slice: int = 0  # largest piece that goes on at once, of random size; 0: as it came
    # After so many bytes from the client the connection is reset (an RST), is closed, brings and
    # takes nothing any more, or brings nothing back while all that the client sends arrives.
    reset_after: int = 0
    close_after: int = 0
    silent_after: int = 0
    unresponsive_after: int = 0

    def broken_by(self, passed: int) -> set[str]:
        """What has become of a connection after so many bytes from the client."""
        ways = ("reset", "close", "silent", "unresponsive")
        return {way for way in ways if 0 < getattr(self, f"{way}_after") <= passed}


class BadNetwork:
    """Forwards connections to a server. Ends with everything that it has open.

    `toxics` is for every connection, or has one for each of the first.
    """

    def __init__(self, target: str, toxics: Toxic | Sequence[Toxic], seed: int = 1) -> None:
        host, _, port = target.rpartition(":")
        self._server = (host, int(port))
        self._toxics = (
            itertools.repeat(toxics)
            if isinstance(toxics, Toxic)
            else itertools.chain(toxics, itertools.repeat(Toxic()))
        )
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self.connections = 0
        self.sent = 0  # bytes of all clients so far
        self.broken = threading.Event()  # a connection is beyond its bytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.target = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "BadNetwork":
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Closes every connection."""
        with self._lock:
            ends, self._open = self._open, []
        _shut(*ends)

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
            ends, toxic, broken = (client, server), next(self._toxics), set[str]()
            for pump in (self._up, self._down):
                threading.Thread(target=pump, args=(*ends, toxic, broken), daemon=True).start()

    def _up(
        self, client: socket.socket, server: socket.socket, toxic: Toxic, broken: set[str]
    ) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                with self._lock:
                    self.sent += len(data)
                if "silent" not in broken:
                    passed += self._pass_on(data, server, toxic)
                broken |= toxic.broken_by(passed)
                if broken:
                    self.broken.set()
                if "reset" in broken:
                    _reset(client)
                    _reset(server)
                    return
                if "close" in broken:
                    break
        _shut(client, server)

    def _down(
        self, client: socket.socket, server: socket.socket, toxic: Toxic, broken: set[str]
    ) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                if not broken:
                    self._pass_on(data, client, toxic)
        _shut(client, server)

    def _pass_on(self, data: bytes, sink: socket.socket, toxic: Toxic) -> int:
        for piece in self._slices(data, toxic):
            time.sleep(self._delay(len(piece), toxic))
            sink.sendall(piece)
        return len(data)

    def _slices(self, data: bytes, toxic: Toxic) -> list[bytes]:
        if not toxic.slice:
            return [data]
        pieces = []
        while data:
            with self._lock:
                size = self._random.randint(1, toxic.slice)
            pieces.append(data[:size])
            data = data[size:]
        return pieces

    def _delay(self, size: int, toxic: Toxic) -> float:
        with self._lock:
            jitter = self._random.random() * toxic.jitter
        return toxic.latency + jitter + (size / toxic.bandwidth if toxic.bandwidth else 0.0)


def _shut(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _reset(end: socket.socket) -> None:
    """Closes with an RST instead of a FIN."""
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.close()
