"""A fleet without servers: the real coordinator over a simulated network and in simulated time.

Everything runs on one event loop whose clock jumps to the next event, so that a run depends on its
seed alone. Links have a rate and a latency; servers, coordinators and links fail when told to.
"""

from __future__ import annotations

import asyncio
import hashlib
import selectors
from dataclasses import dataclass, field

from dorad.errors import Conflict, NotFound, Unavailable
from dorad.fleet import manifest as m
from dorad.fleet.coordinator import Coordinator
from dorad.fleet.members import Held

CHUNK = 16 << 20
RATE = 25e9 / 8  # bytes a second of each link
LATENCY = 0.0002
LOAD_SECONDS = 0.2
PEER_PATIENCE = 2.0  # A receiver gives its sender up after so many seconds without a byte.


class _Clock(selectors.DefaultSelector):
    """Has nothing to wait for: time passes at once."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def select(self, timeout=None):
        assert timeout is not None, "every task waits for another one: a deadlock"
        self.now += max(0.0, timeout)
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self):
        self._simulated = _Clock()
        super().__init__(self._simulated)

    def time(self):
        return self._simulated.now


def run(main):
    """Runs a coroutine in simulated time."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(main)


def now():
    return asyncio.get_running_loop().time()


class Link:
    """One end's rate in one direction. Transfers share it chunk by chunk."""

    def __init__(self, rate=RATE):
        self.rate = rate
        self.sent = 0
        self._free = 0.0

    async def carry(self, count):
        self._free = max(now(), self._free) + count / self.rate
        self.sent += count
        await asyncio.sleep(self._free - now() + LATENCY)


class Crashed(BaseException):
    """The process of a coordinator has ended: none of its code runs any more."""


def digest_of(files):
    """As the servers compute it: by the content alone."""
    return hashlib.sha256(files.tensors_sha256.encode()).hexdigest()


def files_of(content, size=CHUNK):
    sha = hashlib.sha256(content.encode()).hexdigest()
    return m.Files(sha, sha, size)


def down(target):
    return Unavailable(f"{target} is away", code="UNAVAILABLE", retryable=True)


def peer_down(sender):
    return Unavailable(f"{sender} sends nothing", code="UNAVAILABLE", reason="PEER_UNAVAILABLE")


@dataclass
class Version:
    files: m.Files
    ready: bool = False


@dataclass
class Disk:
    """What survives a kill."""

    versions: dict = field(default_factory=dict)  # (name, number) -> Version
    active: dict = field(default_factory=dict)  # name -> number
    highest: dict = field(default_factory=dict)


class Server:
    def __init__(self, target, rate=RATE):
        self.target = target
        self.up = Link(rate)
        self.disk = Disk()
        self.alive = True
        self.cut_off = False  # by a partition
        self.run = 0
        self.incoming = {}  # upload_id -> bytes
        self.uploads = {}  # (name, number, sha) -> upload_id
        self.stream = {}  # upload_id -> the transfer that feeds it
        self._waiters = {}  # in order: a run is the same in every process

    def kill(self):
        self.alive = False
        self.run += 1
        self.incoming.clear()
        self.uploads.clear()
        self.stream.clear()
        self.disk.versions = {k: v for k, v in self.disk.versions.items() if v.ready}
        self.tell()

    def start(self):
        self.alive = True
        self.tell()

    def tell(self):
        for waiter in self._waiters:
            waiter.set()

    async def changed(self, seconds):
        """Waits for a change, or until the time is over: False."""
        event = asyncio.Event()
        self._waiters[event] = None
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
            return True
        except TimeoutError:
            return False
        finally:
            del self._waiters[event]

    def reachable(self):
        return self.alive and not self.cut_off

    def available(self, name, release):
        """Bytes of a release that can be passed on; None: it knows nothing of it."""
        stored = self.disk.versions.get((name, release.version))
        if stored is not None and stored.ready and stored.files == release.files:
            return release.files.size
        upload = self.uploads.get((name, release.version, release.files.tensors_sha256))
        return None if upload is None else self.incoming.get(upload, 0)


class Network:
    """The servers, and the calls to them. `source` is the link of the trainer."""

    def __init__(self, targets=(), rate=RATE):
        self.rate = rate
        self.servers = {target: Server(target, rate) for target in targets}
        self.source = Link(rate)

    def server(self, target):
        server = self.servers.get(target)
        if server is None or not server.reachable():
            raise down(target)
        return server

    async def reach(self, target):
        await asyncio.sleep(LATENCY)
        return self.server(target)

    async def receive(self, target, name, release, next_chunk, lowest):
        """Feeds a transfer. `next_chunk(offset)` waits for bytes and returns their number."""
        server = await self.reach(target)
        run, upload = server.run, release.upload_id
        has = server.disk.versions.get((name, release.version))
        if has is not None and has.files == release.files and upload in server.stream:
            while not has.ready:  # An equal Begin gets the result of the first one.
                await server.changed(60)
                if server.run != run:
                    raise down(target)
            return digest_of(release.files)
        if has is not None or release.version < lowest(server):
            raise Conflict(f"{name}@{release.version} is taken", code="ABORTED")
        mine = server.stream[upload] = object()
        server.uploads[name, release.version, release.files.tensors_sha256] = upload
        server.incoming.setdefault(upload, 0)
        server.tell()
        size = release.files.size
        while server.incoming[upload] < size:
            count = await next_chunk(server.incoming[upload])
            if server.run != run or not server.reachable():
                raise down(target)
            if server.stream.get(upload) is not mine:
                raise Conflict("a newer stream has taken over", code="ABORTED")
            server.incoming[upload] += count
            server.tell()
        # The load goes on without its caller.
        load = asyncio.ensure_future(self._load(server, run, name, release))
        load.add_done_callback(lambda load: load.exception())
        return await asyncio.shield(load)

    async def _load(self, server, run, name, release):
        if (name, release.version) in server.disk.versions:
            raise Conflict(f"{name}@{release.version} is taken", code="ABORTED")
        server.disk.highest[name] = max(server.disk.highest.get(name, 0), release.version)
        version = server.disk.versions[name, release.version] = Version(release.files)
        await asyncio.sleep(LOAD_SECONDS)
        if server.run != run:
            raise down(server.target)
        version.ready = True
        server.tell()
        if server.cut_off:
            raise down(server.target)
        return digest_of(release.files)

    async def send(self, target, name, release):
        async def next_chunk(offset):
            count = min(CHUNK, release.files.size - offset)
            await self.source.carry(count)
            return count

        def lowest(server):
            return 1 + server.disk.highest.get(name, 0)

        return await self.receive(target, name, release, next_chunk, lowest)

    async def fetch(self, target, name, release, sender):
        async def next_chunk(offset):
            while True:
                peer = self.servers.get(sender)
                if peer is None or not peer.reachable():
                    await asyncio.sleep(LATENCY)
                    raise peer_down(sender)
                there = peer.available(name, release)
                if there is not None and there > offset:
                    break
                if not await peer.changed(PEER_PATIENCE):
                    raise peer_down(sender)
            run = peer.run
            count = min(CHUNK, there - offset)
            await peer.up.carry(count)
            if peer.run != run or not peer.reachable():
                raise peer_down(sender)
            return count

        # A version of another server keeps its number.
        return await self.receive(target, name, release, next_chunk, lambda server: 0)

    async def held(self, target, name):
        server = await self.reach(target)
        return [
            Held(
                name=of,
                version=number,
                digest=digest_of(version.files),
                ready=version.ready,
                active=server.disk.active.get(of) == number,
                loading=not version.ready,
            )
            for (of, number), version in server.disk.versions.items()
            if name in (None, of)
        ]

    async def activate(self, target, name, release):
        server = await self.reach(target)
        version = server.disk.versions.get((name, release.version))
        if version is None or not version.ready:
            raise NotFound(f"no {name}@{release.version}", code="NOT_FOUND")
        assert digest_of(version.files) == release.digest
        server.disk.active[name] = release.version
        await asyncio.sleep(LATENCY)

    async def retire(self, target, name, version):
        server = await self.reach(target)
        if server.disk.versions.pop((name, version), None) is None:
            raise NotFound(f"no {name}@{version}", code="NOT_FOUND")
        if server.disk.active.get(name) == version:
            del server.disk.active[name]

    async def answer(self, target, ref):
        """The (version, digest) that makes the tokens of a prompt for a pinned reference."""
        server = await self.reach(target)
        name, _, pin = ref.partition("@")
        number, _, digest = pin.partition(":")
        version = server.disk.versions.get((name, int(number)))
        if version is None or not version.ready or digest_of(version.files) != digest:
            raise NotFound(f"no {ref}", code="NOT_FOUND")
        return int(number), digest


class Store:
    """A manifest store that remembers every manifest."""

    def __init__(self):
        self.history = [(0.0, m.Manifest())]

    @property
    def newest(self):
        return self.history[-1][1]

    async def read(self):
        await asyncio.sleep(LATENCY)
        return m.from_json(m.to_json(self.newest))

    async def compare_and_set(self, expected, manifest):
        await asyncio.sleep(LATENCY)
        if self.newest.generation != expected:
            return False
        assert manifest.generation == expected + 1
        self.history.append((now(), manifest))
        await asyncio.sleep(LATENCY)  # A crash here loses the answer, not the change.
        return True


class Process:
    """One process with a coordinator. After `crash` none of its calls has an effect."""

    def __init__(self, network, store, lease=30.0, name=None):
        self.crashed = False
        self.store = store
        self._tasks = set()
        self.coordinator = Coordinator(
            _Guarded(self, store), _Guarded(self, network), lease=lease, clock=now, name=name
        )

    def start(self, work):
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        return task

    async def crash(self):
        self.crashed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.coordinator.close()


class _Guarded:
    """The calls of one process."""

    def __init__(self, process, to):
        self._process, self._to = process, to

    def __getattr__(self, name):
        method = getattr(self._to, name)

        async def call(*args):
            if self._process.crashed:
                raise Crashed
            result = await method(*args)
            if self._process.crashed:
                raise Crashed
            return result

        return call
