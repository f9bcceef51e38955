"""Random operations against a model of the registry: publish, activate, retire, generate, abort,
pause, sleep, restart and kill -9. At the end nothing is held, leaked, lost or mixed up.

There are 500, and 10,000 in the deep tier. DORAD_RANDOM_OPERATIONS and DORAD_RANDOM_SEED choose how
many and which.
"""

import os
import random
import shutil
import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from dorad.v1 import control_pb2, inference_pb2, types_pb2
from lib.registry_model import FAILED, READY, RETIRING, RegistryModel
from lib.server import Server, command, start, wait_until
from lib.tiers import deep
from lib.wire import ABORTED, LENGTH, Sample, collect, failure

OPERATIONS = int(os.environ.get("DORAD_RANDOM_OPERATIONS", "10000" if deep() else "500"))
SEED = int(os.environ.get("DORAD_RANDOM_SEED", "1"))
NAMES = ["a", "b", "c", "policy"]
CONTENTS = 4
PROMPT = [17, 4, 99, 3, 250, 8, 21, 77, 5, 30, 31, 32, 33, 34, 35, 36, 37, 38]
MOST_TOKENS = 120
STREAMS = 5
POLICIES = [
    inference_pb2.IN_FLIGHT_POLICY_PIN,
    inference_pb2.IN_FLIGHT_POLICY_SWITCH_KEEP_KV,
    inference_pb2.IN_FLIGHT_POLICY_SWITCH_RECOMPUTE,
]
STATES = {
    READY: {types_pb2.ADAPTER_STATE_READY},
    # Which of the two depends on who still holds it.
    RETIRING: {types_pb2.ADAPTER_STATE_RETIRING, types_pb2.ADAPTER_STATE_GONE},
    FAILED: {types_pb2.ADAPTER_STATE_FAILED},
}


@dataclass
class Stream:
    call: object
    request_id: str
    name: str
    version: int  # that it began with
    content: int
    policy: int
    tokens: int
    samples: dict[int, Sample] = field(default_factory=dict)


class World:
    """The server under test, and what is known about it."""

    def __init__(self, zoo, directory: Path) -> None:
        self.random = random.Random(SEED)
        self.zoo, self.store = zoo, directory / "store"
        self.log = directory / "server.log"
        self.folders = [zoo.adapter("llama2", "dora", seed) for seed in range(CONTENTS)]
        self.foreign = zoo.adapter("slow", "lora_head")  # of another base
        self.model = RegistryModel()
        self.digests: dict[int, str] = {}
        self.content_of: dict[tuple[str, int], int] = {}
        self.streams: list[Stream] = []
        self.generation = 0
        self.next_id = 0
        self.done: Counter[str] = Counter()
        self.expected = self._expected()
        self.server = self._start()

    def _settings(self) -> dict:
        # Few pages: long streams preempt each other.
        return {"engine.kv_bytes": 3 << 20, "engine.threads": 1}

    def _start(self) -> Server:
        # Not all versions fit; the ephemeral ones come back from host memory.
        settings = self._settings() | {
            "adapters.store_path": str(self.store),
            "adapters.resident_bytes": 6 * self.version_bytes,
            "adapters.host_bytes": 256 << 20,
        }
        return start(command(self.zoo.model("llama2"), None, settings), self.log)

    def _expected(self) -> list[list[int]]:
        """The greedy answer under each content, from servers that did nothing else."""
        line = command(
            self.zoo.model("llama2"),
            {f"c{i}": folder for i, folder in enumerate(self.folders)},
            self._settings(),
        )
        server = start(line, self.log)
        options = dict(temperature=0.0, max_tokens=MOST_TOKENS, ignore_eos=True)
        adapters = [f"c{i}" for i in range(CONTENTS)] + [""]  # the base is -1
        answers = [
            server.wire.generate(PROMPT, adapter=adapter, **options)[0].tokens
            for adapter in adapters
        ]
        self.version_bytes = server.wire.adapter("c0").resident_bytes
        server.wire.close()
        assert server.stop() == 0
        assert len({tuple(answer[:8]) for answer in answers}) == CONTENTS + 1
        return answers

    @property
    def wire(self):
        return self.server.wire

    # --- What is asked, and what must come back.

    def refusal(self, call, *arguments, **options) -> str:
        """The reason of a refusal, or "" with the answer in self.answer."""
        try:
            self.answer = call(*arguments, **options)
        except grpc.RpcError as error:
            return failure(error).reason
        return ""

    def agree(self, said: str, expected: str) -> None:
        # Records of ended versions are kept for a while only.
        if expected == "ADAPTER_NOT_READY" and said == "ADAPTER_NOT_FOUND":
            return
        assert said == expected

    def some_version(self, name: str) -> int:
        known = list(self.model.name(name).versions)
        if known and self.random.random() < 0.85:
            ready = self.model.ready(name)
            return self.random.choice(ready if ready and self.random.random() < 0.8 else known)
        return self.random.randint(1, self.model.name(name).last + 2)

    def check_spans(self, sample: Sample, name: str, versions: set[int]) -> None:
        for span_name, number, digest, _, _ in sample.spans:
            assert (span_name, number in versions) == (name, True), (sample.spans, versions)
            assert digest == self.digests[self.content_of[name, number]]

    # --- Operations.

    def publish(self) -> None:
        name = self.random.choice(NAMES)
        number = None
        if self.random.random() < 0.15:
            number = max(1, self.model.name(name).last + self.random.randint(-1, 3))
        bad = self.random.random() < 0.08
        content = -2 if bad else self.random.randrange(CONTENTS)
        durable, activate = self.random.random() < 0.5, self.random.random() < 0.6
        version, reason = self.model.publish(name, number, content, durable, activate)
        begin = dict(durable=durable, activate=activate, tags={"content": str(content)})
        begin |= {} if number is None else dict(version=number)
        said = self.refusal(
            self.wire.publish, name, self.foreign if bad else self.folders[content], **begin
        )
        if reason == "refused":
            assert said, "an adapter of another base was taken"
            return
        assert said == reason
        if said:
            return
        adapter = self.answer.adapter
        assert (adapter.name, adapter.version, adapter.active) == (name, version, activate)
        assert adapter.durable == durable
        assert self.digests.setdefault(content, adapter.digest) == adapter.digest
        self.content_of[name, version] = content

    def activate(self) -> None:
        name = self.random.choice(NAMES)
        number = self.some_version(name)
        expected, is_right = None, True
        if self.random.random() < 0.4:
            is_right = self.random.random() < 0.7
            expected = self.wire.info().generation - (0 if is_right else 1)
        before = self.model.name(name).active
        said = self.refusal(self.wire.activate, name, number, expected)
        if said == "GENERATION_MISMATCH" and is_right:
            return  # a version went in between, when the last request that held it ended
        self.agree(said, self.model.activate(name, number, is_right))
        if not said:
            assert self.answer.previous_version == before

    def retire(self) -> None:
        name = self.random.choice(NAMES)
        number, force = self.some_version(name), self.random.random() < 0.3
        said = self.refusal(self.wire.retire, name, number, force)
        self.agree(said, self.model.retire(name, number))

    def generate(self) -> None:
        name = self.random.choice([*NAMES, ""])
        number = 0
        if name and self.random.random() < 0.5:
            number = self.some_version(name)
        adapter = f"{name}@{number}" if number else name
        n, tokens = self.random.randint(1, 3), self.random.randint(1, 12)
        options = dict(temperature=0.0, max_tokens=tokens, ignore_eos=True, n=n, adapter=adapter)
        said = self.refusal(self.wire.generate, PROMPT, **options)
        version, reason = self.model.resolve(name, number) if name else (0, "")
        self.agree(said, reason)
        if said:
            return
        content = self.content_of[name, version] if name else -1
        for sample in self.answer:
            assert sample.tokens == self.expected[content][:tokens]
            if name:
                self.check_spans(sample, name, {version})

    def begin_stream(self) -> None:
        if len(self.streams) >= STREAMS:
            self.end_stream()
        name = self.random.choice(NAMES)
        version, reason = self.model.resolve(name, 0)
        if reason:
            return
        self.next_id += 1
        stream = Stream(
            None,
            f"s{self.next_id}",
            name,
            version,
            self.content_of[name, version],
            self.random.choice(POLICIES),
            self.random.randint(20, MOST_TOKENS),
        )
        stream.call = self.wire.stream(
            PROMPT,
            adapter=name,
            temperature=0.0,
            max_tokens=stream.tokens,
            ignore_eos=True,
            n=self.random.randint(1, 2),
            request_id=stream.request_id,
            in_flight=stream.policy,
        )
        collect([next(stream.call)], stream.samples)
        self.streams.append(stream)

    def end_stream(self) -> None:
        if not self.streams:
            return
        stream = self.streams.pop(self.random.randrange(len(self.streams)))
        samples = collect(stream.call, stream.samples)
        pinned = stream.policy == inference_pb2.IN_FLIGHT_POLICY_PIN
        for sample in samples.values():
            assert sample.reason in (LENGTH, ABORTED)
            assert sample.reason == ABORTED or len(sample.tokens) == stream.tokens
            versions = {stream.version}
            if not pinned:
                versions = {number for name, number in self.content_of if name == stream.name}
            self.check_spans(sample, stream.name, versions)
            # Up to the first switch it is the answer of the version that it began with.
            own = next((s[4] for s in sample.spans if s[1] == stream.version and s[3] == 0), 0)
            assert sample.tokens[:own] == self.expected[stream.content][:own]

    def cancel_stream(self) -> None:
        if self.streams:
            self.streams.pop(self.random.randrange(len(self.streams))).call.cancel()

    def abort(self) -> None:
        if not self.streams:
            return
        stream = self.random.choice(self.streams)
        assert self.wire.abort(stream.request_id) <= 1

    def pause(self) -> None:
        """A pause, some changes that it must not hinder, and the way back."""
        scope = self.random.choice(["", *NAMES])
        modes = [control_pb2.PAUSE_MODE_KEEP, control_pb2.PAUSE_MODE_ABORT]
        self.wire.pause(self.random.choice(modes), scope)
        for _ in range(3):
            self.random.choice([self.publish, self.activate, self.retire])()
        self.wire.resume(scope)

    def sleep(self) -> None:
        """Memory is released, changes are made, memory is allocated again; streams continue."""
        tags = self.random.sample(["weights", "kv", "adapters"], self.random.randint(1, 3))
        self.wire.sleep(*tags, keep_kv=self.random.random() < 0.5)
        changes = [self.activate, self.retire]
        if "weights" not in tags:
            changes.append(self.publish)
        for _ in range(3):
            self.random.choice(changes)()
        self.wire.wake(*tags)
        assert not self.wire.info().engine.sleeping

    def restart(self) -> None:
        while self.streams:
            self.end_stream()
        self.wire.close()
        assert self.server.stop() == 0
        self.server = self._start()
        self._restarted()

    def kill(self) -> None:
        os.kill(self.server.pid, signal.SIGKILL)
        self.server.process.wait()
        for stream in self.streams:
            with pytest.raises(grpc.RpcError):
                collect(stream.call, stream.samples)
                raise grpc.RpcError  # what it got may be all that there was to come
        self.streams.clear()
        self.wire.close()
        self.server = self._start()
        self._restarted()

    def _restarted(self) -> None:
        self.model.restart()
        assert self.wire.info().generation >= self.generation
        self.check()

    # --- What holds at all times.

    def check(self) -> None:
        listed = {(item.name, item.version): item for item in self.wire.list_adapters()}
        for name, entry in self.model.names.items():
            for number, version in entry.versions.items():
                item = listed.pop((name, number), None)
                if item is None:
                    assert version.state != READY, f"{name}@{number} is lost"
                    continue
                assert item.state in STATES[version.state], (name, number, item.state)
                assert item.active == (entry.active == number)
                if version.state != FAILED:
                    assert item.digest == self.digests[version.content]
                    assert item.durable == version.durable
                    assert item.tags["content"] == str(version.content)
        assert not listed, f"nobody published {list(listed)}"
        generation = self.wire.info().generation
        assert generation >= self.generation
        self.generation = generation

    def run(self) -> None:
        weights = {
            self.publish: 14,
            self.activate: 14,
            self.retire: 12,
            self.generate: 30,
            self.begin_stream: 12,
            self.end_stream: 6,
            self.cancel_stream: 2,
            self.abort: 2,
            self.pause: 3,
            self.sleep: 3,
            self.check: 5,
            self.restart: 0.5,
            self.kill: 0.7,
        }
        operations = self.random.choices(list(weights), list(weights.values()), k=OPERATIONS)
        for index, operation in enumerate(operations):
            try:
                operation()
            except BaseException:
                print(f"operation {index}, {operation.__name__}, of seed {SEED}")
                raise
            self.done[operation.__name__] += 1

    def finish(self) -> None:
        while self.streams:
            self.end_stream()
        self.check()
        for name in NAMES:
            for number in self.model.ready(name):
                assert self.refusal(self.wire.retire, name, number) == ""
                self.model.retire(name, number)
        wait_until(lambda: self.wire.info().memory_bytes["adapters"] == 0, what="memory freed")
        info = self.wire.info().engine
        assert (info.adapter_leases, info.kv_pages_used) == (0, 0)
        assert (info.running_sequences, info.queued_requests, info.frozen_requests) == (0, 0, 0)
        states = {item.state for item in self.wire.list_adapters()}
        assert states <= {types_pb2.ADAPTER_STATE_GONE, types_pb2.ADAPTER_STATE_FAILED}
        objects = self.store / "objects"
        wait_until(
            lambda: not any(path.is_file() for path in objects.rglob("*")), what="objects removed"
        )


@pytest.mark.timeout(900)  # Minutes of disk syncs: a slow disk is no fault.
def test_random_operations_lose_and_mix_nothing(zoo, tmp_path: Path, figures) -> None:
    world = World(zoo, tmp_path)
    try:
        world.run()
        world.finish()
        world.wire.close()
        assert world.server.stop() == 0
    except BaseException:
        print(world.server.log()[-6000:])
        raise
    finally:
        if world.server.process.poll() is None:
            world.server.process.kill()
            world.server.process.wait()
        shutil.rmtree(world.store, ignore_errors=True)
    figures.append(f"{sum(world.done.values())} random operations: {dict(world.done)}")
