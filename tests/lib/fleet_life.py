"""The random life of a fleet of real servers and processes, and what it has promised meanwhile.

* No sample has a span of a version that was not the fleet's between its start and its end, and each
  has the tokens of that version.
* No acknowledged version is lost: the fleet's version is that one or a later one, until somebody
  retires the name.
* Of racing publishes of a number one is committed, and only its process is told so.
* After the last failure all members agree with the manifest.

One thread drives it.
"""

import contextlib
import itertools
import pathlib
import queue
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
from dorad.fleet import manifest as m
from dorad.fleet.manifest_store import ManifestFile

from lib.fleet_history import FleetHistory
from lib.fleet_members import Member, Members
from lib.fleet_process import MOST_TOKENS, POINTS, PROMPTS, Process
from lib.partitions import ANYONE
from lib.server import wait_until

NAMES = ["a", "b", "c", "d", "e"]
LEASE = 4.0
BANDWIDTH = 30e6
"""Bytes a second of a connection: an adapter of 7.5 MB takes a quarter of a second a hop."""
PATIENCE = 900.0
"""Others may have most of the machine: how long an agreement takes is a figure, and asserts
nothing."""
FEWEST, MOST = 4, 8
WEIGHTS = {
    "publish": 24,
    "race": 6,
    "activate": 5,
    "retire": 2,
    "join": 4,
    "leave": 4,
    "kill": 8,
    "start": 12,
    "kill a relay": 6,
    "kill a process": 4,
    "die at a point": 12,
    "cut": 8,
    "mend": 8,
}


@dataclass
class Content:
    """One adapter's files, their digest, and the greedy answers of PROMPTS under it."""

    folder: pathlib.Path
    digest: str
    answers: list[list[int]]

    @property
    def size(self) -> int:
        return (self.folder / "adapter_model.safetensors").stat().st_size


@dataclass
class Asked:
    """A command whose answer is out."""

    process: Process
    what: str
    name: str = ""
    content: int = 0
    tag: str = ""


@dataclass
class Life:
    model: pathlib.Path
    contents: list[Content]
    folder: pathlib.Path
    seed: int
    members: Members = field(init=False)
    seen: Counter[str] = field(default_factory=Counter)
    agreements: list[float] = field(default_factory=list)
    """Seconds from each last failure to agreement."""

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.manifest = ManifestFile(self.folder / "manifest")
        self.history = FleetHistory(self.folder / "manifest.history")
        self.trainers: list[Process] = []
        self.workers: list[Process] = []
        self.members = Members(self.model, self.folder, BANDWIDTH)
        self._heard: queue.Queue[tuple[Process, dict[str, Any]]] = queue.Queue()
        self._numbers = itertools.count(1)
        self._asked: dict[int, Asked] = {}
        self._leaving: dict[int, Member] = {}
        self.acknowledged: dict[tuple[str, int], str] = {}  # -> tag
        self.refused: set[str] = set()  # tags that certainly were not committed
        self.races: list[list[str]] = []  # of tags
        self.content_of: dict[str, int] = {}  # by tag
        self.rounds = 0  # of workers, since the last failure

    # --- Parts ------------------------------------------------------------------------------------

    def begin(self, members: int, trainers: int, workers: int) -> None:
        for _ in range(members):
            self.members.add()
        for _ in range(trainers):
            self.trainers.append(self._process("trainer"))
        self.members.settle(wait=True)
        for member in self.members.all:
            self._ask(self.trainers[0], "join", target=member.target)
        self._until(lambda: not self._asked, "the first members")
        for _ in range(workers):
            self._start_worker()

    def _process(self, kind: str) -> Process:
        log = self.folder / f"{kind}.log"
        return Process(
            kind, self.folder / "manifest", LEASE, log, lambda *heard: self._heard.put(heard)
        )

    def _start_worker(self) -> None:
        worker = self._process("worker")
        worker.ask(do="roll_out", names=NAMES, seed=self.draw.random())
        self.workers.append(worker)

    def close(self) -> None:
        for process in [*self.trainers, *self.workers]:
            process.kill()
        self.members.close()

    def _manifest(self) -> m.Manifest:
        return self.manifest._read()

    def _ask(self, process: Process, what: str, **arguments: Any) -> int:
        number = next(self._numbers)
        self._asked[number] = Asked(process, what)
        process.ask(id=number, do=what, **arguments)
        return number

    # --- What processes say -----------------------------------------------------------------------

    def hear(self) -> None:
        """Takes up all that was said so far, and replaces processes that have died."""
        self.members.settle(wait=False)
        while True:
            try:
                process, line = self._heard.get_nowait()
            except queue.Empty:
                return
            self.history.read()
            if "gone" in line:
                self._gone(process)
            elif "samples" in line:
                self._check_samples(**line)
            elif "failed" in line:
                self._failed(**line)
            elif line["id"] in self._asked:
                number = line.pop("id")
                self._answered(number, self._asked.pop(number), **line)

    def _gone(self, process: Process) -> None:
        lost = [number for number, asked in self._asked.items() if asked.process is process]
        for number in lost:
            self.seen[f"{self._asked.pop(number).what}: no answer, its process died"] += 1
            self._left(number)
        if process in self.trainers:
            self.trainers.remove(process)
            self.trainers.append(self._process("trainer"))
        else:
            self.workers.remove(process)
            self._start_worker()

    def _answered(
        self,
        number: int,
        asked: Asked,
        version: tuple[int, str] | None = None,
        error: str = "",
        message: str = "",
        reason: str = "",
    ) -> None:
        self.seen[f"{asked.what}: {error} {reason}" if error else asked.what] += 1
        if asked.what == "leave":
            self._left(number)
        if asked.what != "publish":
            return
        commits = self.history.by_tag().get(asked.tag, [])
        if error:
            assert error in ("Lost", "PoolError"), (asked, error, message)
            # A process that was taken over does not know what became of its version.
            unknown = ("taken over", "no longer prepared", "is committed")
            if not any(text in message for text in unknown):
                self.refused.add(asked.tag)
            return
        assert version is not None
        number, digest = version
        assert digest == self.contents[asked.content].digest, "another one's content"
        assert (asked.name, number) not in self.acknowledged, "two were told that they won"
        committed = [(name, release.version, release.digest) for name, release in commits]
        assert committed == [(asked.name, number, digest)], (asked, version, committed)
        self.acknowledged[asked.name, number] = asked.tag

    def _check_samples(
        self, name: str, began: float, ended: float, samples: list[dict[str, Any]]
    ) -> None:
        allowed = self.history.allowed(name, began, ended)
        for sample in samples:
            digests = set()
            for of, number, digest in sample["spans"]:
                where = f"{of}@{number} {digest[:12]}: {name} was {allowed}, {began} to {ended}"
                assert of == name and (number, digest) in allowed, where
                digests.add(digest)
            tokens = sample["tokens"]
            assert tokens and digests
            if len(digests) == 1:
                content = next(c for c in self.contents if c.digest in digests)
                assert tokens == content.answers[sample["prompt"]][: len(tokens)], "other tokens"
            self.seen["sample" if len(digests) == 1 else "sample of several versions"] += 1
        self.rounds += 1

    def _failed(self, failed: str, message: str, name: str, began: float) -> None:
        assert failed in ("NotFound", "Unavailable", "DeadlineExceeded"), (failed, message)
        if failed == "NotFound":
            assert self.history.was_without(name, began, time.monotonic()), message
            self.seen["prompts of a name without a version"] += 1
        else:
            self.seen[f"prompts failed: {message}"] += 1

    # --- Operations -------------------------------------------------------------------------------

    def publish(self, trainer: Process, name: str, content: int) -> str:
        """Returns its tag."""
        number = next(self._numbers)
        tag = str(number)
        self._asked[number] = Asked(trainer, "publish", name, content, tag)
        self.content_of[tag] = content
        trainer.ask(
            id=number,
            do="publish",
            name=name,
            path=str(self.contents[content].folder),
            tags={"publish": tag},
            keep_last=2,
        )
        return tag

    def _publishing(self) -> set[str]:
        """The tags of publishes without an answer so far."""
        return {asked.tag for asked in self._asked.values() if asked.what == "publish"}

    def _phases(self) -> set[str]:
        """Of the publishes that are under way."""

        def tags(releases: Iterable[m.Release]) -> set[str]:
            return {release.options["tags"]["publish"] for release in releases}

        manifest = self._manifest()
        adapters = manifest.adapters.values()
        prepared = tags(a.prepared.release for a in adapters if a.prepared is not None)
        committed = tags(manifest.committed().values())
        under_way = self._publishing()
        found = {
            "not prepared yet": under_way - prepared - committed,
            "prepared": prepared,
            "committed, not active yet": under_way & committed,
        }
        return {phase for phase, which in found.items() if which}

    def _alive(self) -> list[Member]:
        return [member for member in self.members.all if member.alive]

    def operate(self) -> None:
        draw = self.draw
        what = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        self.seen[f"operation: {what}"] += 1
        trainer = draw.choice(self.trainers)
        busy = {asked.name for asked in self._asked.values()}
        name = draw.choice([name for name in NAMES if name not in busy] or NAMES)
        content = draw.randrange(len(self.contents))
        alive = self._alive()
        most_are_up = 2 * (len(alive) - 1) > len(self.members.all)
        if what in ("kill a process", "cut") or (what == "kill" and most_are_up):
            self.seen.update(f"{what} while a publish is {phase}" for phase in self._phases())
        if what == "publish":
            self.publish(trainer, name, content)
        elif what == "race":
            racers = draw.sample(self.trainers, 2)
            tags = [self.publish(each, name, draw.randrange(len(self.contents))) for each in racers]
            self.races.append(tags)
        elif what == "activate" and alive:
            self._activate_there(draw.choice(alive), name)
        elif what == "retire":
            self._ask(trainer, "retire", name=name)
        elif what == "join" and len(self.members.all) < MOST:
            self._ask(trainer, "join", target=self.members.add().target)
        elif what == "leave" and len(self.members.all) - len(self._leaving) > FEWEST:
            member = draw.choice(self.members.all)
            if member.alive and member not in self._leaving.values():
                number = self._ask(trainer, "leave", target=member.target)
                self._leaving[number] = member
        elif what == "kill" and most_are_up:
            self.members.kill(draw.choice(alive))
        elif what == "start":
            for member in self.members.all:
                self.members.start(member)
        elif what == "kill a relay" and most_are_up:
            self._kill_relay(trainer, name)
        elif what == "kill a process":
            draw.choice([*self.trainers, *self.workers]).program.kill()
        elif what == "die at a point":
            # Any process reaches some of them as the keeper.
            draw.choice([trainer] * 3 + self.workers).ask(do="die", at=draw.choice(POINTS))
            self.publish(trainer, name, content)
        elif what == "cut":
            self._cut()
        elif what == "mend":
            self.members.partitions.mend()

    def _activate_there(self, member: Member, name: str) -> None:
        """As somebody beside the fleet may do."""
        try:
            ready = member.ready(name)
            if ready:
                member.wire.activate(name, self.draw.choice(ready))
                self.seen["activate"] += 1
        except grpc.RpcError as error:
            self.seen[f"activate: {error.code().name}"] += 1

    def _left(self, number: int) -> None:
        """The server of a member that has left ends. It may be one still: its process died."""
        member = self._leaving.pop(number, None)
        if member is None or member.target in self._manifest().members:
            return
        self.members.settle(wait=True)
        self.members.remove(member)

    def _kill_relay(self, trainer: Process, name: str) -> None:
        """Kills a member that has a part of an adapter."""
        large = max(range(len(self.contents)), key=lambda n: self.contents[n].size)
        tag = self.publish(trainer, name, large)
        deadline = time.monotonic() + 3.0
        while time.monotonic() < deadline and tag in self._publishing():
            self.hear()
            adapter = self._manifest().adapters.get(name)
            if adapter is None or adapter.prepared is None:
                time.sleep(0.01)
                continue
            release = adapter.prepared.release
            for member in self._alive():
                if 0 < self._received(member, release.upload_id) < release.files.size:
                    self.members.kill(member)
                    self.seen["a relay killed in the middle"] += 1
                    return

    @staticmethod
    def _received(member: Member, upload_id: str) -> int:
        try:
            return member.wire.upload(upload_id).received_bytes
        except grpc.RpcError:
            return 0

    def _cut(self) -> None:
        """One link, from a server, a process of the fleet or everybody to a member."""
        draw = self.draw
        member = draw.choice(self.members.all)
        servers = [other.server.pid for other in self.members.all if other.server is not None]
        callers = [process.program.pid for process in [*self.trainers, *self.workers]]
        origin = draw.choice([ANYONE, *servers, *callers])
        who = "everybody" if origin == ANYONE else "a server" if origin in servers else "a process"
        cut = self.members.partitions.cut(origin, member.target, draw.random() < 0.5)
        self.seen[f"links cut from {who} to a member"] += 1
        self.seen[f"connections cut from {who} to a member"] += cut

    # --- Promises ---------------------------------------------------------------------------------

    def _until(self, condition: Callable[[], Any], what: str) -> None:
        def heard() -> Any:
            self.hear()
            return condition()

        wait_until(heard, PATIENCE, what)

    def others(self) -> dict[str, dict[str, tuple[int, str]] | None]:
        """Members that do not have what the manifest says, or something else, too: what they have.

        None: a member does not answer.
        """
        manifest = self._manifest()
        wanted = {name: (of.version, of.digest) for name, of in manifest.committed().items()}
        there = {member.target: member for member in self.members.all}
        found = {target: there[target].actives() for target in manifest.members}
        return {target: actives for target, actives in found.items() if actives != wanted}

    def _rests(self) -> bool:
        """Whether no process has anything left to do."""
        adapters = self._manifest().adapters.values()
        return not self._asked and all(adapter.prepared is None for adapter in adapters)

    def heal(self) -> None:
        """Ends all failures, waits for agreement, and checks every promise.

        The time of an agreement is from the last failure, or from the last commit if that is later.
        """
        self.members.partitions.mend()
        for process in [*self.trainers, *self.workers]:
            process.ask(do="die", at="")
        for member in self.members.all:
            self.members.start(member)
        self.members.settle(wait=True)
        healed, agreed = time.monotonic(), 0.0

        def agree_and_rest() -> bool:
            nonlocal agreed
            if self.others():
                agreed = 0.0
            elif not agreed:
                agreed = time.monotonic()
            return agreed > 0.0 and self._rests()

        self._until(agree_and_rest, "agreement")
        self.history.read()
        self.agreements.append(max(0.0, agreed - max(healed, self.history.last_change)))
        self._publish_one()
        self.rounds = 0
        self._until(lambda: self.rounds >= 2 * len(self.workers), "samples for all")
        # A member whose call has failed gets this version from another one.
        self._until(lambda: not self.others(), "agreement after a publish")
        self.check()

    def _publish_one(self) -> None:
        """Nothing stands in the way of a publish any more."""
        before = len(self.acknowledged)

        def is_published() -> bool:
            if len(self.acknowledged) == before and not self._asked:
                self.publish(self.trainers[0], self.draw.choice(NAMES), 0)
            return len(self.acknowledged) > before

        self._until(is_published, "a publish")

    def check(self) -> None:
        self.history.read()
        commits = self.history.by_tag()
        for tag, made in commits.items():
            assert len(made) == 1, f"publish {tag} was committed twice: {made}"
            name, release = made[0]
            assert release.digest == self.contents[self.content_of[tag]].digest
            assert tag not in self.refused, f"{name}@{release.version} was refused and committed"
        for (name, number), tag in self.acknowledged.items():
            ((of, release),) = commits[tag]
            assert (of, release.version) == (name, number)
        self._check_answers()

    def _check_answers(self) -> None:
        """Each member computes what the manifest says."""
        manifest = self._manifest()

        def check(member: Member) -> None:
            if member.target not in manifest.members:
                return
            for name, release in manifest.committed().items():
                content = next(c for c in self.contents if c.digest == release.digest)
                ref = f"{name}@{release.version}:{release.digest}"
                options = dict(max_tokens=MOST_TOKENS, temperature=0.0, ignore_eos=True)
                sample = member.wire.generate(PROMPTS[0], adapter=ref, **options)[0]
                right = list(sample.tokens) == content.answers[0]
                assert right, f"{member.target} computes otherwise"

        self.members.each(check)

    def totals(self) -> Counter[str]:
        """What has happened how often."""
        commits = self.history.by_tag()
        races = Counter(sum(tag in commits for tag in tags) for tags in self.races)
        found = self.seen | Counter({f"races with {n} commits": c for n, c in races.items()})
        with contextlib.suppress(FileNotFoundError):
            deaths = (self.folder / "manifest.deaths").read_text().split()
            found |= Counter(f"deaths at {point}" for point in deaths)
        return found

    def live(self, operations: int, between: int = 100) -> None:
        """So many operations; all promises are checked after each `between` of them."""
        for number in range(1, operations + 1):
            self.hear()
            self.operate()
            time.sleep(self.draw.choice([0.0, 0.05, 0.1, 0.2]))
            if number % between == 0 or number == operations:
                self.heal()
