"""Real servers with a store each behind proxies: they die, return and leave."""

import os
import pathlib
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
from dorad.v1 import types_pb2

from lib.partitions import Partitions
from lib.peers import ALLOWED
from lib.server import Server, command, start
from lib.wire import Wire

START_SECONDS = 180.0
"""Others start and load at the same time."""
SETTINGS = {
    "engine.kv_bytes": 16 << 20,
    "engine.threads": 1,
    "server.drain_timeout_seconds": 1,
    "server.metrics_listen": "",
} | ALLOWED


@dataclass(eq=False)
class Member:
    """One server. Its target is its proxy's, the same in all its lives."""

    target: str
    store: pathlib.Path
    log: pathlib.Path
    starting: Future[Server] | None = None
    server: Server | None = None

    @property
    def alive(self) -> bool:
        return self.server is not None

    @property
    def wire(self) -> Wire:
        assert self.server is not None
        return self.server.wire

    def actives(self) -> dict[str, tuple[int, str]] | None:
        """(version, digest) by name. None: it does not answer."""
        if not self.alive:
            return None
        try:
            return {v.name: (v.version, v.digest) for v in self.wire.list_adapters() if v.active}
        except grpc.RpcError:
            return None

    def ready(self, name: str) -> list[int]:
        ready = types_pb2.ADAPTER_STATE_READY
        return [v.version for v in self.wire.list_adapters(name) if v.state == ready]


@dataclass(eq=False)
class Members:
    """All of them. One thread uses it; servers start beside it."""

    model: pathlib.Path
    folder: pathlib.Path
    bandwidth: float
    all: list[Member] = field(default_factory=list)
    _made: int = 0

    def __post_init__(self) -> None:
        self.partitions = Partitions(self.bandwidth)
        self._starts = ThreadPoolExecutor(2)

    def add(self) -> Member:
        """A new server that is no member yet. It starts."""
        name, self._made = f"server-{self._made}", self._made + 1
        target = self.partitions.listen()
        member = Member(target, self.folder / name, self.folder / f"{name}.log")
        self.all.append(member)
        self.start(member)
        return member

    def start(self, member: Member) -> None:
        """`settle` says when it is ready. Nothing happens to one that is alive."""
        if member.alive or member.starting is not None:
            return
        settings = SETTINGS | {"adapters.store_path": member.store}
        line = command(self.model, settings=settings)
        member.starting = self._starts.submit(start, line, member.log, START_SECONDS)

    def settle(self, *, wait: bool) -> None:
        """Adopts the servers that have become ready: all that start, or those so far."""
        for member in self.all:
            starting = member.starting
            if starting is not None and (wait or starting.done()):
                member.server, member.starting = starting.result(3 * START_SECONDS), None
                self.partitions.forward(member.target, member.server.grpc)

    def kill(self, member: Member) -> None:
        server, member.server = member.server, None
        assert server is not None
        os.kill(server.pid, signal.SIGKILL)
        server.process.wait(60)
        server.wire.close()

    def remove(self, member: Member) -> None:
        """Ends a server for good. It must end in order."""
        self.all.remove(member)
        self._end(member)
        self.partitions.close(member.target)

    @staticmethod
    def _end(member: Member) -> None:
        if member.server is not None:
            member.server.wire.close()
            code = member.server.stop()
            assert code == 0, f"exit code {code}\n{member.server.log()[-4000:]}"
            member.server = None

    def close(self) -> None:
        """Ends all. Raises the first failure once all have ended."""
        try:
            self.settle(wait=True)
            self.each(self._end)
        finally:
            self._starts.shutdown()
            for member in self.all:
                if member.starting is not None and member.starting.exception() is None:
                    member.server = member.starting.result()
                if member.server is not None:
                    member.server.process.kill()
            self.partitions.end()

    def each(self, do: Callable[[Member], None]) -> None:
        for done in [self._starts.submit(do, member) for member in self.all]:
            done.result(120)
