"""A TCP proxy on the loopback that cuts connections in the middle of what they carry."""

import contextlib
import socket
import threading
from collections.abc import Sequence


class Proxy:
    """Forwards connections to a server; connection i loses its way after `limits[i]` bytes.

    The bytes are those that go to the server, all of which still arrive. A connection beyond its
    limit is cut at once or, with `deaf`, brings nothing back until cut() is called.
    """

    def __init__(self, target: str, limits: Sequence[int], deaf: bool = False) -> None:
        host, _, port = target.rpartition(":")
        self._server = (host, int(port))
        self._limits = list(limits)
        self._deaf = deaf
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self.connections = 0
        self.lost = threading.Event()  # a connection is beyond its limit
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.target = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Cuts every connection."""
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
            with self._lock:
                limit = self._limits.pop(0) if self._limits else None
                self._open += [client, server]
                self.connections += 1
            deaf = threading.Event()
            threading.Thread(
                target=self._up, args=(client, server, limit, deaf), daemon=True
            ).start()
            threading.Thread(target=self._down, args=(server, client, deaf), daemon=True).start()

    def _up(
        self, client: socket.socket, server: socket.socket, limit: int | None, deaf: threading.Event
    ) -> None:
        sent = 0
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                server.sendall(data)
                sent += len(data)
                if limit is not None and sent >= limit:
                    deaf.set()
                    self.lost.set()
                    if not self._deaf:
                        break
        _shut(client, server)

    @staticmethod
    def _down(server: socket.socket, client: socket.socket, deaf: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                if not deaf.is_set():
                    client.sendall(data)
        _shut(client, server)


def _shut(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
