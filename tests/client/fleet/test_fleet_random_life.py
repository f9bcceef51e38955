"""Random operations and failures over a simulated network: what a fleet promises holds in each run.

* No acknowledged version is lost: the fleet's version is that one or a later one.
* A prompt is answered by a version that was the fleet's between its start and its end, or just
  before: "just before" is the age of the router's manifest.
* No server has a version active that was never the fleet's.
* Of racing coordinators one wins: no two publishes end with the same number.
* After the last failure all members agree within five seconds.
"""

import asyncio
import contextlib
import random
from dataclasses import dataclass, field

import pytest
from dorad.errors import DoradError, PoolError
from lib.fleet_simulation import (
    CHUNK,
    LATENCY,
    Crashed,
    Network,
    Process,
    Server,
    Store,
    digest_of,
    files_of,
    now,
    run,
)

NAMES = ["a", "b"]
TEND = 1.0  # Seconds between two rounds of a coordinator, and the age of a router's manifest.
LEASE = 6.0
RATE = 1e9


@dataclass
class Life:
    seed: int
    network: Network = field(default_factory=lambda: Network(rate=RATE))
    store: Store = field(default_factory=Store)

    def __post_init__(self):
        self.draw = random.Random(self.seed)
        self.processes = []
        self.work = set()
        self.acknowledged = {}  # (name, version) -> files
        self.seen = {}  # what happened -> how often
        self.joined = 0
        self.committed = set()  # (name, version)

    def count(self, what):
        self.seen[what] = self.seen.get(what, 0) + 1

    # --- Parts --------------------------------------------------------------------------------

    def new_process(self):
        process = Process(self.network, self.store, lease=LEASE)
        process.start(self.keep_tending(process))
        self.processes.append(process)
        return process

    async def keep_tending(self, process):
        while True:
            await process.coordinator.tend()
            await asyncio.sleep(TEND)

    async def new_member(self):
        target = f"t{self.joined}"
        self.joined += 1
        self.network.servers[target] = Server(target, RATE)
        await self.draw.choice(self.processes).coordinator.join([target])
        return target

    def begin(self, work):
        task = asyncio.ensure_future(work)
        self.work.add(task)
        task.add_done_callback(self.work.discard)

    # --- Operations ---------------------------------------------------------------------------

    async def publish(self, process):
        name = self.draw.choice(NAMES)
        files = files_of(f"content {self.draw.random()}", self.draw.choice([1, 3, 9]) * CHUNK)
        try:
            outcome = await process.coordinator.publish(name, files, {"durable": True})
        except DoradError as error:
            self.count(f"publish: {type(error).__name__}")
        else:
            key = (name, outcome.release.version)
            assert key not in self.acknowledged, f"two publishes of {key} were acknowledged"
            assert outcome.release.digest == digest_of(files), "another one's content"
            self.acknowledged[key] = files
            self.count("publish")

    async def retire(self, process):
        name = self.draw.choice(NAMES)
        try:
            await process.coordinator.retire(name)
            self.count("retire")
        except DoradError:
            self.count("retire: refused")

    async def prompt(self):
        """As a router does it: the name pinned by its manifest, some members in any order."""
        name = self.draw.choice(NAMES)
        began = now()
        age = self.draw.uniform(0, TEND)
        manifest = [old for at, old in self.store.history if at <= began - age or at == 0.0][-1]
        ref = manifest.pinned(name)
        if ref == name:
            return
        members = list(manifest.members)
        self.draw.shuffle(members)
        for target in members:
            try:
                number, digest = await self.network.answer(target, ref)
            except DoradError:
                continue
            during = [old for at, old in self.store.history if began - age <= at <= now()]
            allowed = {
                (release.version, release.digest)
                for old in [manifest, *during]
                for release in [old.committed().get(name)]
                if release is not None
            }
            assert (number, digest) in allowed, f"{ref} answered by {number}"
            self.count("prompt")
            return
        self.count("prompt: no member")

    async def step(self):
        draw, servers = self.draw, self.network.servers
        what = draw.choices(
            ["publish", "race", "prompt", "kill", "start", "cut", "mend", "crash", "retire"]
            + ["join", "leave", "wait"],
            [20, 4, 30, 8, 10, 4, 6, 6, 1, 2, 2, 7],
        )[0]
        process = draw.choice(self.processes)
        if what == "publish":
            process.start(self.publish(process))
        elif what == "race":
            for other in draw.sample(self.processes, 2):
                other.start(self.publish(other))
        elif what == "prompt":
            self.begin(self.prompt())
        elif what == "kill":
            # Most of the disks stay reachable, as a majority must for any publish.
            draw.choice(list(servers.values())).kill()
        elif what == "start":
            for server in servers.values():
                if not server.alive:
                    server.start()
                    break
        elif what == "cut":
            draw.choice(list(servers.values())).cut_off = True
        elif what == "mend":
            for server in servers.values():
                server.cut_off = False
                server.tell()
        elif what == "crash":
            self.processes.remove(process)
            await process.crash()
            self.new_process()
        elif what == "retire" and draw.random() < 0.3:
            process.start(self.retire(process))
        elif what == "join" and len(servers) < 8:
            await self.new_member()
        elif what == "leave" and len(servers) > 4:
            target = draw.choice(list(servers))
            with contextlib.suppress(PoolError):  # It has the only copy of a version.
                await process.coordinator.leave(target)
                servers.pop(target).kill()
        self.count(f"step: {what}")
        await asyncio.sleep(draw.choice([0, LATENCY / 2, LATENCY, 0.01, 0.1, 0.5]))

    # --- Promises -----------------------------------------------------------------------------

    def check_history(self):
        """No change of any coordinator takes the manifest back."""
        before = None
        for _, manifest in self.store.history:
            if before is not None:
                assert manifest.generation == before.generation + 1
                for name, adapter in manifest.adapters.items():
                    old = before.adapters.get(name)
                    if old is None:
                        continue
                    assert adapter.highest >= old.highest
                    was = old.committed.version if old.committed else 0
                    if adapter.committed is not None and adapter.committed != old.committed:
                        assert adapter.committed.version > was
                        assert old.prepared.release.version == adapter.committed.version
            before = manifest
        for (name, number), files in self.acknowledged.items():
            adapter = self.store.newest.adapters[name]
            assert adapter.highest >= number
            retired = adapter.committed is None
            assert retired or adapter.committed.version >= number
            if not retired and adapter.committed.version == number:
                assert adapter.committed.files == files

    def check_actives(self):
        """Nothing becomes active before its commit."""
        newest = self.store.newest.committed().items()
        self.committed |= {(name, release.version) for name, release in newest}
        for server in self.network.servers.values():
            assert set(server.disk.active.items()) <= self.committed

    def agree(self):
        wanted = {name: r.version for name, r in self.store.newest.committed().items()}
        for server in self.network.servers.values():
            if server.disk.active != wanted:
                return False
            for name, release in self.store.newest.committed().items():
                assert (
                    digest_of(server.disk.versions[name, release.version].files) == release.digest
                )
        return True

    async def heal(self):
        """Ends all failures and waits for agreement. Returns the seconds."""
        for process in self.processes:  # What they had begun must not outlast the last failure.
            await process.crash()
        self.processes.clear()
        for server in self.network.servers.values():
            server.cut_off = False
            server.start()
        began = now()
        self.new_process()
        while not self.agree():
            assert now() - began < 120, "no agreement"
            await asyncio.sleep(0.01)
        return now() - began

    async def live(self, steps):
        self.new_process()
        self.new_process()
        for _ in range(6):
            await self.new_member()
        for number in range(steps):
            try:
                await self.step()
            except DoradError as error:
                self.count(f"step: {type(error).__name__}")
            failed = [t for p in self.processes for t in p._tasks if t.done() and t.exception()]
            for task in failed:
                if not isinstance(task.exception(), Crashed):
                    raise task.exception()
            for process in self.processes:
                process._tasks = {t for t in process._tasks if not t.done()}
            self.check_actives()
            if number % 250 == 249:
                self.check_history()
        await asyncio.gather(*self.work)
        seconds = await self.heal()
        self.check_history()
        for process in self.processes:
            await process.crash()
        return seconds


@pytest.mark.parametrize("seed", range(6))
def test_a_fleet_keeps_its_promises_in_a_random_life(seed):
    life = Life(seed)
    assert run(life.live(400)) <= 5.0
    assert life.seen["publish"] >= 5, life.seen
    assert life.seen["prompt"] >= 30, life.seen


@pytest.mark.deep
def test_a_fleet_keeps_its_promises_in_ten_thousand_operations(figures):
    life = Life(77)
    seconds = run(life.live(10_000))
    assert seconds <= 5.0
    figures.append(f"10,000 operations: agreement {seconds:.2f} s after the last failure")
    figures.extend(f"  {what} {often}" for what, often in sorted(life.seen.items()))
