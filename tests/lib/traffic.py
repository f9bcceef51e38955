"""Traffic that moves every metric that a CPU can move: what a trainer and its rollout workers do,
and what goes wrong."""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from dorad.v1 import inference_pb2

from lib.server import Server
from lib.wire import Wire

SWITCH = inference_pb2.IN_FLIGHT_POLICY_SWITCH_KEEP_KV
POLICY = "policy"
# Of calls that must not fail, on a machine that does much else.
PATIENCE = 240.0


def settings(store: Path, adapter_bytes: int, **more: object) -> dict:
    """Room for two and a half adapters of that size, and little for requests that wait."""
    return {
        "adapters.store_path": store,
        "adapters.resident_bytes": int(2.5 * adapter_bytes),
        "adapters.keep_last": 2,
        "limits.max_queued_requests": 48,
        "engine.max_running_sequences": 24,
        "engine.kv_bytes": 8 << 20,
    } | more


class Traffic:
    """Workers that go on until stop(). A failure of what must not fail is kept for check()."""

    def __init__(self, server: Server, folders: list[Path], vocabulary: int, context: int) -> None:
        """folders: adapters of the server's model. Publishes them all, durably."""
        self.target, self.folders = server.grpc, folders
        self.vocabulary, self.context = vocabulary, context
        self.names = [f"expert-{i}" for i in range(len(folders))]
        for name, folder in zip(self.names, folders, strict=True):
            server.wire.publish(name, folder, activate=True, durable=True)
        server.wire.publish(POLICY, folders[0], activate=True, durable=True)
        self.over = threading.Event()
        self.failures: list[BaseException] = []
        self.threads: list[threading.Thread] = []

    def start(self, pace: float = 1.0) -> None:
        """pace: of pauses between what a worker does, as a factor."""
        jobs: list[tuple[Callable, float]] = [(self.roll_out, 0.0)] * 6
        jobs += [(self.score, 0.2), (self.train, 1.0), (self.err, 0.3), (self.flood, 2.0)]
        jobs += [(self.pause, 7.0)]
        for i, (job, rest) in enumerate(jobs):
            thread = threading.Thread(target=self.repeat, args=(job, rest * pace, i), daemon=True)
            thread.start()
            self.threads.append(thread)

    def stop(self) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join(PATIENCE + 60)
            assert not thread.is_alive(), "a worker hangs"

    def check(self) -> None:
        assert not self.failures, self.failures[0]

    def repeat(self, job: Callable[[Wire, random.Random], None], rest: float, seed: int) -> None:
        wire, choose = Wire(self.target), random.Random(seed)
        try:
            while not self.over.is_set():
                job(wire, choose)
                self.over.wait(rest)
        except BaseException as error:
            self.failures.append(error)
        finally:
            wire.close()

    def prompt(self, choose: random.Random) -> list[int]:
        """One of a few beginnings, which the prefix cache knows, and an end of its own."""
        shared = random.Random(choose.randrange(4))
        length = self.context // 4
        return [shared.randrange(10, self.vocabulary) for _ in range(length)] + [
            choose.randrange(10, self.vocabulary) for _ in range(choose.randrange(1, length))
        ]

    # --- What may not fail, but by a full queue.
    def roll_out(self, wire: Wire, choose: random.Random) -> None:
        adapter = choose.choice([*self.names, POLICY, POLICY, ""])
        options = dict(max_tokens=self.context // 4, n=choose.randrange(1, 5), ignore_eos=True)
        if adapter == POLICY:
            options["in_flight"] = SWITCH
        try:
            wire.generate(self.prompt(choose), adapter=adapter, timeout=PATIENCE, **options)
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            time.sleep(0.1)

    def score(self, wire: Wire, choose: random.Random) -> None:
        sequences = [self.prompt(choose) for _ in range(2)]
        with contextlib.suppress(grpc.RpcError):
            wire.score(sequences, ["", choose.choice(self.names)])

    def train(self, wire: Wire, choose: random.Random) -> None:
        folder = choose.choice(self.folders)
        wire.publish(POLICY, folder, activate=True, durable=True, timeout=PATIENCE)

    # --- What is to fail.
    def err(self, wire: Wire, choose: random.Random) -> None:
        prompt = self.prompt(choose)
        with contextlib.suppress(grpc.RpcError):
            wire.generate(prompt, adapter="nobody")
        with contextlib.suppress(grpc.RpcError):
            wire.generate(prompt, adapter=POLICY, max_tokens=self.context // 4, timeout=0.005)
        with contextlib.suppress(grpc.RpcError):
            wire.publish_bytes("broken", "{}", b"no tensors")
        call = wire.stream(prompt, max_tokens=self.context // 4, ignore_eos=True)
        with contextlib.suppress(grpc.RpcError):
            next(iter(call))
            call.cancel()

    def flood(self, wire: Wire, choose: random.Random) -> None:
        calls = [wire.stream(self.prompt(choose), max_tokens=2) for _ in range(96)]
        for call in calls:
            with contextlib.suppress(grpc.RpcError):
                list(call)

    def pause(self, wire: Wire, choose: random.Random) -> None:
        wire.pause()
        time.sleep(0.3)
        wire.resume()


@contextmanager
def traffic(
    server: Server, folders: list[Path], vocabulary: int, context: int, pace: float = 1.0
) -> Iterator[Traffic]:
    running = Traffic(server, folders, vocabulary, context)
    running.start(pace)
    try:
        yield running
    finally:
        running.stop()
    running.check()
