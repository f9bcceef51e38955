"""A server under mixed traffic for a long time: does anything grow, and is every error explained?

  tests/bench/soak.py [--minutes 30] [--json FILE] [--seed 1]

Streams, scores, cancels, deadlines, publishes, activations, retirements, uploads that break, bad
adapters, pauses and aborts against a tiny random model on the CPU. Once a second it samples the
process (resident memory, descriptors, threads) and the engine (leases, KV pages, requests). Prints
the slope of the resident memory after a warm-up (Theil-Sen: the median of the slopes of all pairs
of samples; of the last half once more, since heaps take their time to settle), the ranges of the
others, and every error with its count. Exits with 1 when an error was not expected, a call hung, or
something was left behind.
"""

import argparse
import collections
import hashlib
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "client" / "src")]

import grpc  # noqa: E402
from dorad.v1 import adapters_pb2, control_pb2, inference_pb2, types_pb2  # noqa: E402
from lib.server import Server, serve, wait_until  # noqa: E402
from lib.wire import Wire, collect, failure, publish_parts  # noqa: E402
from lib.zoo import Zoo  # noqa: E402

FAMILY = "slow"
NAMES = ["a", "b", "c", "policy"]
CONTENTS = 6
PATIENCE = 60.0  # seconds; a call that takes longer hangs
MiB = 1 << 20

# What each operation may meet: the others change and remove adapters, pause and abort.
GONE = {"ADAPTER_NOT_FOUND", "ADAPTER_NO_ACTIVE_VERSION", "ADAPTER_NOT_READY"}
BUSY = {"QUEUE_FULL", "ENGINE_PAUSED"}
# Ephemeral versions that run at the same time can need more than the host memory of this test.
FULL = {"OUT_OF_MEMORY"}
EXPECTED = {
    "generate": GONE | BUSY | FULL,
    "cancel": GONE | BUSY | FULL | {"cancelled"},
    "deadline": GONE | BUSY | FULL | {"DEADLINE_EXCEEDED"},
    "score": GONE | BUSY | FULL | {"REQUEST_ABORTED"},
    "publish": FULL,
    "activate": GONE,
    "retire": GONE,
    "break": FULL | {"cancelled"},
    "bad": {"ADAPTER_TENSOR_SHAPE", "ADAPTER_RANK_MISMATCH", "SAFETENSORS_INCOMPLETE"},
    "pause": {"PAUSE_SUPERSEDED"},
    "abort": set(),
    "look": GONE,
}


class Traffic:
    """Callers in threads of their own, each with its channel, until stop is set."""

    def __init__(self, server: Server, folders: list[Path], seed: int) -> None:
        self.server, self.seed = server, seed
        self.images = [
            (
                (folder / "adapter_config.json").read_text(),
                (folder / "adapter_model.safetensors").read_bytes(),
            )
            for folder in folders
        ]
        self.stop = threading.Event()
        self.lock = threading.Lock()
        self.done: collections.Counter = collections.Counter()
        self.errors: collections.Counter = collections.Counter()
        self.unexpected: list[str] = []
        self.threads: list[threading.Thread] = []

    def start(self) -> None:
        plans: list[dict[str, int]] = [
            *[{"generate": 6, "cancel": 2, "deadline": 1}] * 3,
            {"score": 4, "generate": 1, "cancel": 1},
            {"publish": 3, "activate": 2, "retire": 2, "break": 2, "bad": 2},
            {"pause": 1, "abort": 1, "look": 6},
        ]
        for index, plan in enumerate(plans):
            thread = threading.Thread(target=self._run, args=(index, plan), daemon=True)
            thread.start()
            self.threads.append(thread)

    def join(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join(2 * PATIENCE)
            if thread.is_alive():
                self.unexpected.append("a caller hangs")

    def _run(self, index: int, plan: dict[str, int]) -> None:
        choose = random.Random(f"{self.seed}-{index}")
        wire = Wire(self.server.grpc)
        caller = Caller(wire, choose, self.images)
        names, weights = list(plan), list(plan.values())
        while not self.stop.is_set():
            name = choose.choices(names, weights)[0]
            operation: Callable[[], None] = getattr(caller, f"do_{name}")
            try:
                operation()
                outcome = None
            except grpc.RpcError as error:
                outcome = reason_of(error)
            except grpc.FutureCancelledError:
                outcome = "cancelled"
            except Exception as error:  # a broken promise: a wrong answer
                outcome = f"{type(error).__name__}: {error}"
            with self.lock:
                self.done[name] += 1
                if outcome is None:
                    continue
                self.errors[f"{name}: {outcome}"] += 1
                if outcome not in EXPECTED[name] and len(self.unexpected) < 100:
                    self.unexpected.append(f"{name}: {outcome}")
        wire.close()


def reason_of(error: grpc.RpcError) -> str:
    code = error.code()
    if code == grpc.StatusCode.CANCELLED:
        return "cancelled"
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return "DEADLINE_EXCEEDED"
    return failure(error).reason or f"{code.name} {error.details()}"


class Caller:
    """One client's operations."""

    def __init__(self, wire: Wire, choose: random.Random, images: list[tuple[str, bytes]]) -> None:
        self.wire, self.choose, self.images = wire, choose, images

    def _adapter(self) -> str:
        return self.choose.choice(["", *NAMES])

    def _request(self) -> dict:
        choose, adapter = self.choose, self._adapter()
        prefix = choose.randint(1, 3)  # of few: prefixes are shared
        return dict(
            prompt=[10 + prefix] * choose.randint(1, 60) + [choose.randint(3, 2000)],
            adapter=adapter,
            n=choose.randint(1, 3),
            max_tokens=choose.randint(1, 80),
            temperature=choose.choice([0.0, 0.8]),
            logprobs=choose.choice([None, inference_pb2.LOGPROB_MODE_RAW]),
            salt=choose.choice(["", "tenant"]),
            in_flight=choose.randint(1, 3) if adapter else 1,
            priority=choose.randint(-1, 1),
        )

    def do_generate(self) -> None:
        self.wire.generate(timeout=PATIENCE, mode=self.choose.randint(1, 2), **self._request())

    def do_cancel(self) -> None:
        call = self.wire.stream(timeout=PATIENCE, **self._request() | {"max_tokens": 200})
        for _ in range(self.choose.randint(0, 5)):
            if next(call, None) is None:
                break
        call.cancel()
        for _ in call:
            pass

    def do_deadline(self) -> None:
        timeout = self.choose.choice([0.001, 0.01, 0.1])
        collect(self.wire.stream(timeout=timeout, **self._request() | {"max_tokens": 200}))

    def do_score(self) -> None:
        sequences = [[self.choose.randint(3, 2000) for _ in range(self.choose.randint(2, 80))]]
        self.wire.score(sequences * 2, [self._adapter(), ""], timeout=PATIENCE)

    def _begin(self, name: str, content: int, **values) -> adapters_pb2.PublishBegin:
        config, image = self.images[content]
        digest = hashlib.sha256(image).digest()
        return adapters_pb2.PublishBegin(
            name=name,
            adapter_config_json=config,
            safetensors_size=len(image),
            safetensors_sha256=digest,
            **values,
        )

    def do_publish(self) -> None:
        content = self.choose.randrange(len(self.images))
        begin = self._begin(
            self.choose.choice(NAMES),
            content,
            activate=self.choose.random() < 0.7,
            durable=self.choose.random() < 0.5,
            keep_last=2,
        )
        parts = publish_parts(begin, self.images[content][1])
        self.wire.adapters.Publish(parts, timeout=PATIENCE)

    def _some_version(self) -> tuple[str, int]:
        """Mostly one that is ready: gone ones are remembered, too."""
        versions = self.wire.list_adapters(self.choose.choice(NAMES))
        if self.choose.random() < 0.9:
            versions = [v for v in versions if v.state == types_pb2.ADAPTER_STATE_READY]
        chosen = self.choose.choice(versions) if versions else None
        return (chosen.name, chosen.version) if chosen else ("a", 1)

    def do_activate(self) -> None:
        self.wire.activate(*self._some_version())

    def do_retire(self) -> None:
        self.wire.retire(*self._some_version(), force=self.choose.random() < 0.5)

    def do_break(self) -> None:
        """An upload that ends in the middle; sometimes it is resumed."""
        content = self.choose.randrange(len(self.images))
        resumable = self.choose.random() < 0.5
        upload_id = f"u{self.choose.getrandbits(60):x}" if resumable else None
        begin = self._begin("broken", content, upload_id=upload_id)
        image = self.images[content][1]
        broken = threading.Event()

        def half():
            yield adapters_pb2.PublishRequest(begin=begin)
            yield adapters_pb2.PublishRequest(
                chunk=adapters_pb2.PublishChunk(data=image[: len(image) // 2])
            )
            broken.wait(PATIENCE)

        call = self.wire.adapters.Publish.future(half(), timeout=PATIENCE)
        time.sleep(0.02)
        call.cancel()
        broken.set()
        if resumable and self.choose.random() < 0.5:
            try:
                received = self.wire.upload(upload_id).received_bytes
            except grpc.RpcError as error:
                assert failure(error).reason == "UPLOAD_NOT_FOUND"  # the break came first
                received = 0
            done = self.wire.publish_rest(begin, image, received).adapter
            self.wire.retire("broken", done.version)
        call.result()

    def do_bad(self) -> None:
        config, image = self.images[0]
        if self.choose.random() < 0.5:
            self.wire.publish_bytes("bad", config, image[: len(image) // 2], timeout=PATIENCE)
        else:
            values = json.loads(config) | {"r": 3}
            self.wire.publish_bytes("bad", values, image, timeout=PATIENCE)
        raise AssertionError("a bad adapter was taken")

    def do_pause(self) -> None:
        scope = self.choose.choice(["", *NAMES])
        mode = self.choose.choice(
            [control_pb2.PAUSE_MODE_KEEP, control_pb2.PAUSE_MODE_WAIT, control_pb2.PAUSE_MODE_ABORT]
        )
        try:
            self.wire.pause(mode, scope)
            time.sleep(self.choose.random() * 0.1)
        finally:
            self.wire.resume(scope)
        time.sleep(0.5)

    def do_abort(self) -> None:
        request = inference_pb2.AbortRequest(all=True)
        if self.choose.random() < 0.7:
            request = inference_pb2.AbortRequest(adapter=self.choose.choice(NAMES))
        self.wire.inference.Abort(request, timeout=PATIENCE)
        time.sleep(0.5)

    def do_look(self) -> None:
        self.wire.info()
        self.wire.list_adapters()
        watch = self.wire.adapters.Watch(adapters_pb2.WatchRequest(), timeout=PATIENCE)
        watch.initial_metadata()
        watch.cancel()
        time.sleep(0.1)
        self.wire.adapter(self.choose.choice(NAMES))


# --- What is measured.


def sample(server: Server, begin: float) -> dict:
    engine = server.wire.info().engine
    process = Path(f"/proc/{server.pid}")
    return {
        "t": time.monotonic() - begin,
        "rss": server.rss(),
        "fds": len(list((process / "fd").iterdir())),
        "threads": len(list((process / "task").iterdir())),
        "leases": engine.adapter_leases,
        "kv_used": engine.kv_pages_used,
        "running": engine.running_sequences,
        "queued": engine.queued_requests,
    }


def slope(samples: list[dict], key: str) -> float:
    """Theil-Sen: per second."""
    points = samples[:: max(1, len(samples) // 400)]
    slopes = [
        (later[key] - earlier[key]) / (later["t"] - earlier["t"])
        for index, earlier in enumerate(points)
        for later in points[index + 1 :]
    ]
    return statistics.median(slopes) if slopes else float("nan")


def soak(options: argparse.Namespace, directory: Path) -> dict:
    zoo = Zoo(directory / "zoo")
    zoo.directory.mkdir()
    folders = [
        zoo.adapter(FAMILY, kind, seed)
        for seed in range(CONTENTS // 2)
        for kind in ("dora", "lora")
    ]
    settings = {
        "engine.kv_bytes": 2 * MiB,  # few enough that requests are put back
        "model.max_context": 300,
        "engine.max_running_sequences": 8,
        "limits.max_queued_requests": 8,
        "adapters.store_path": directory / "store",
        "adapters.resident_bytes": 6 * MiB,  # adapters take turns
        "adapters.host_bytes": 4 * MiB,
        "adapters.upload_ttl_seconds": 20,
        "log.level": "error",
    }
    with serve(zoo.model(FAMILY), {"a": folders[0]}, settings, timeout=120) as server:
        traffic = Traffic(server, folders, options.seed)
        begin, samples = time.monotonic(), []
        traffic.start()
        while time.monotonic() - begin < 60 * options.minutes:
            samples.append(sample(server, begin))
            time.sleep(1)
        traffic.join()
        metrics = server.metrics()

        def nothing_left() -> bool:
            now = sample(server, begin)
            return not (now["leases"] or now["kv_used"] or now["running"] or now["queued"])

        try:
            wait_until(nothing_left, 30, "nothing left")
        except AssertionError:
            traffic.unexpected.append(f"left behind: {sample(server, begin)}")
        samples_end = sample(server, begin)
        log = server.log()
        exit_code = server.stop()
    warm_up = min(300.0, 20 * options.minutes)
    steady = [s for s in samples if s["t"] >= warm_up]
    ranges = {
        key: [min(s[key] for s in steady), max(s[key] for s in steady)]
        for key in ("rss", "fds", "threads", "leases", "kv_used")
    }
    return {
        "minutes": options.minutes,
        "warm_up_s": warm_up,
        "operations": dict(traffic.done),
        "errors": dict(traffic.errors),
        "unexpected": sorted(set(traffic.unexpected)),
        "rss_slope_bytes_per_hour": 3600 * slope(steady, "rss"),
        "rss_slope_last_half_bytes_per_hour": 3600 * slope(samples[len(samples) // 2 :], "rss"),
        "ranges": ranges,
        "end": samples_end,
        "exit_code": exit_code,
        "tokens": metrics.get("dorad_generated_tokens_total"),
        "preemptions": metrics.get("dorad_engine_preemptions_total"),
        "evictions": metrics.get("dorad_adapter_evictions_total"),
        "log_errors": [line for line in log.splitlines() if line][:20],
        "samples": samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dorad-soak-") as directory:
        result = soak(options, Path(directory))
    if options.json:
        options.json.write_text(json.dumps(result))
    print(f"{options.minutes:g} minutes, of which {result['warm_up_s']:.0f} s warm-up")
    print("operations  " + ", ".join(f"{k} {v}" for k, v in sorted(result["operations"].items())))
    for error, count in sorted(result["errors"].items()):
        print(f"error       {count:6d} {error}")
    low, high = (value / MiB for value in result["ranges"]["rss"])
    print(
        f"rss         {low:.1f} to {high:.1f} MiB, slope "
        f"{result['rss_slope_bytes_per_hour'] / MiB:+.2f} MiB/h, of the last half "
        f"{result['rss_slope_last_half_bytes_per_hour'] / MiB:+.2f}"
    )
    for key in ("fds", "threads", "leases", "kv_used"):
        print(f"{key:11} {result['ranges'][key][0]} to {result['ranges'][key][1]}")
    print(
        f"tokens {result['tokens']:.0f}, preemptions {result['preemptions']:.0f}, evictions "
        f"{result['evictions']:.0f}; exit code {result['exit_code']}"
    )
    for line in result["unexpected"] + result["log_errors"]:
        print(f"UNEXPECTED  {line}")
    sys.exit(1 if result["unexpected"] or result["log_errors"] or result["exit_code"] else 0)


if __name__ == "__main__":
    main()
