"""TCP proxies on the loopback, in front of the members of a fleet: they cut single links.

A link has the process at its begin and the listener at its end. The kernel tells which process a
connection comes from, so that a server may reach one server and not another one.
"""

import asyncio
import contextlib
import os
import re
import socket
import struct
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_SOCKET = re.compile(r"socket:\[(\d+)\]")
ANYONE = 0
"""In place of a process id: of every connection."""


@dataclass(eq=False)
class _Connection:
    client: asyncio.StreamWriter
    port: int
    """Of the process that made it."""
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class _Listener:
    server: asyncio.Server
    port: int
    upstream: str = ""
    connections: set[_Connection] = field(default_factory=set)


class Partitions:
    """Forwards connections to the members' servers until `end`. Thread-safe.

    Args:
      bandwidth: bytes a second of each connection, in each direction.
    """

    def __init__(self, bandwidth: float) -> None:
        self._bandwidth = bandwidth
        self._listeners: dict[str, _Listener] = {}
        self._cut: dict[tuple[int, str], bool] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def end(self) -> None:
        for target in list(self._listeners):
            self.close(target)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def listen(self) -> str:
        """A new listener's address."""

        async def begin() -> str:
            server = await asyncio.start_server(
                lambda reader, writer: self._serve(target, reader, writer), "127.0.0.1", 0
            )
            port = server.sockets[0].getsockname()[1]
            target = f"127.0.0.1:{port}"
            self._listeners[target] = _Listener(server, port)
            return target

        return self._run(begin())

    def forward(self, target: str, upstream: str) -> None:
        """From now on connections to `target` go to `upstream`."""
        self._listeners[target].upstream = upstream

    def close(self, target: str) -> None:
        async def end() -> None:
            listener = self._listeners.pop(target)
            listener.server.close()
            for connection in list(listener.connections):
                _reset(connection.client)
                connection.goes_on.set()

        self._run(end())

    def cut(self, origin: int, target: str, silent: bool) -> int:
        """Nothing gets from a process to a listener, nor back. `origin`: its id, or ANYONE. Silent:
        nobody is told.

        Returns how many connections were open there.
        """

        async def apply() -> int:
            self._cut[origin, target] = silent
            listener = self._listeners[target]
            found = [each for each in listener.connections if _is_of(origin, each, listener)]
            for connection in found:
                self._apply(connection, target)
            return len(found)

        return self._run(apply())

    def mend(self) -> None:
        """Ends every cut. What waited on a silent link arrives."""

        async def apply() -> None:
            self._cut.clear()
            for listener in self._listeners.values():
                for connection in listener.connections:
                    connection.goes_on.set()

        self._run(apply())

    def _apply(self, connection: _Connection, target: str) -> None:
        listener = self._listeners[target]
        cuts = [
            silent
            for (origin, to), silent in self._cut.items()
            if to == target and _is_of(origin, connection, listener)
        ]
        if not cuts:
            connection.goes_on.set()
        elif all(cuts):
            connection.goes_on.clear()
        else:
            _reset(connection.client)
            connection.goes_on.set()

    async def _serve(
        self, target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        listener = self._listeners.get(target)
        if listener is None:
            _reset(writer)
            return
        connection = _Connection(writer, writer.get_extra_info("peername")[1])
        listener.connections.add(connection)
        upstream = None
        try:
            self._apply(connection, target)
            await connection.goes_on.wait()
            host, _, number = listener.upstream.rpartition(":")
            back, upstream = await asyncio.open_connection(host, int(number))
            pumps = [
                asyncio.ensure_future(self._pump(reader, upstream, connection)),
                asyncio.ensure_future(self._pump(back, writer, connection)),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
        except (OSError, ValueError):
            pass  # The server is down: the client's connection ends, too.
        finally:
            listener.connections.discard(connection)
            _reset(writer)
            if upstream is not None:
                _reset(upstream)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        connection: _Connection,
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await connection.goes_on.wait()
                writer.write(data)
                await writer.drain()
                if len(data) > 1 << 12:
                    await asyncio.sleep(len(data) / self._bandwidth)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Closes with an RST: what is on its way is lost, as when a process dies."""
    end = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _is_of(origin: int, connection: _Connection, listener: _Listener) -> bool:
    return origin == ANYONE or connection.port in _ports_of(origin, listener.port)


def _ports_of(process: int, listener: int) -> set[int]:
    """The ports of a process that are connected to a listener's port."""
    remote = f":{listener:04X}"
    inodes = dict[str, int]()
    # gRPC's sockets are of IPv6, also where they reach an address of IPv4.
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[2].endswith(remote):
                inodes[words[9]] = int(words[1].rpartition(":")[2], 16)
    found = set[int]()
    with contextlib.suppress(OSError), os.scandir(f"/proc/{process}/fd") as files:
        for file in files:
            with contextlib.suppress(OSError):
                match = _SOCKET.match(os.readlink(file.path))
                if match and match[1] in inodes:
                    found.add(inodes[match[1]])
    return found
