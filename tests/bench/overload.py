"""What becomes of the requests that a server can serve when ten times as many come.

  tests/bench/overload.py [--seconds 20] [--rounds 3] [--factor 10] [--tokens 32] [--json FILE]

First finds the capacity with a closed loop (as many callers as the server runs sequences), then
offers `factor` times that, with random times between arrivals that do not wait for answers. Prints
the goodput of both, how long refusals took, and what they carried. The model is tiny and random.
The callers are on the server's own machine: they get what it leaves (nice 10), and what processor
time both took is printed. How long a refusal takes is what one more caller sees, who sends 20
requests a second from a process of its own that does not wait for the others. Both phases take
turns, for the sake of machines that others use, too.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "client" / "src")]

import grpc  # noqa: E402
from dorad.v1 import inference_pb2_grpc  # noqa: E402
from lib.wire import failure, generate_request  # noqa: E402

PROMPT = list(range(11, 43))
RUNNING = 16
QUEUED = 32
WARM_UP = 3.0  # seconds
DRIVERS = 2  # processes
PROBES = 20.0  # a second


# --- A driver: a process of its own, so that the callers' work is not in each other's way.


async def drive(target: str, rate: float, callers: int, seconds: float, tokens: int, seed: int):
    """Calls at `rate` a second or, if that is 0, from `callers` that wait for their answers."""
    choose = random.Random(seed)
    results: list[dict] = []
    begin = time.monotonic()
    end = begin + WARM_UP + seconds
    request = generate_request(PROMPT, max_tokens=tokens, ignore_eos=True, bypass=True)
    options = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def call() -> None:
            sent = time.monotonic()
            stream = stub.Generate(request, timeout=120)
            try:
                async for _ in stream:
                    pass
                results.append({"sent": sent, "done": time.monotonic(), "code": "OK"})
            except grpc.RpcError as error:
                done = time.monotonic()
                trailers = dict(error.trailing_metadata() or ())
                results.append(
                    {
                        "sent": sent,
                        "done": done,
                        "code": error.code().name,
                        "retry_info": failure(error).retry_after is not None,
                        "pushback": "grpc-retry-pushback-ms" in trailers,
                        "headers": len(error.initial_metadata() or ()),
                    }
                )

        async def caller() -> None:
            while time.monotonic() < end:
                await call()

        if rate == 0:
            await asyncio.gather(*(caller() for _ in range(callers)))
        else:
            tasks, due = set(), time.monotonic()
            while due < end:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                task = asyncio.create_task(call())
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                due += choose.expovariate(rate)
            # What was admitted last would not be counted; and the next phase wants a quiet server.
            await asyncio.gather(*tasks)
    window = (begin + WARM_UP, end)
    return [r for r in results if window[0] <= r["done"] < window[1]]


def children_seconds() -> float:
    """CPU time of all children that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def run_drivers(target: str, rate: float, callers: int, options: argparse.Namespace) -> list[dict]:
    def driver(seed: int, rate: float, nice: int) -> subprocess.Popen:
        line = ["nice", "-n", str(nice), sys.executable, __file__, "--drive", target]
        line += ["--rate", str(rate), "--callers", str(callers // DRIVERS), "--seed", str(seed)]
        line += ["--seconds", str(options.seconds), "--tokens", str(options.tokens)]
        return subprocess.Popen(line, stdout=subprocess.PIPE, text=True)

    processes = [driver(seed, rate / DRIVERS, 10) for seed in range(DRIVERS)]
    if rate > 0:
        processes.append(driver(DRIVERS, PROBES, 0))
    results = []
    for index, process in enumerate(processes):
        said, _ = process.communicate(timeout=options.seconds + 300)
        if process.returncode != 0:
            raise RuntimeError("a driver failed")
        results += [result | {"probe": index == DRIVERS} for result in json.loads(said)]
    return results


# --- The measurement.


def percentile(values: list[float], share: float) -> float:
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def summarise(results: list[dict], seconds: float) -> dict:
    served = [r for r in results if r["code"] == "OK"]
    refused = [r for r in results if r["code"] == "RESOURCE_EXHAUSTED"]
    waits = [r["done"] - r["sent"] for r in refused if r["probe"]]
    return {
        "goodput": len(served) / seconds,
        "offered_and_ended": len(results) / seconds,
        "served": len(served),
        "refused": len(refused),
        "refused_probes": len(waits),
        "other_codes": sorted({r["code"] for r in results} - {"OK", "RESOURCE_EXHAUSTED"}),
        "served_p50_s": percentile([r["done"] - r["sent"] for r in served], 0.5),
        "served_p99_s": percentile([r["done"] - r["sent"] for r in served], 0.99),
        "refused_p50_ms": 1e3 * percentile(waits, 0.5),
        "refused_p99_ms": 1e3 * percentile(waits, 0.99),
        "without_retry_info": sum(not r["retry_info"] for r in refused),
        "without_pushback": sum(not r["pushback"] for r in refused),
        "with_headers": sum(r["headers"] > 0 for r in refused),
    }


class Phase:
    """What came of one way of calling, over all rounds."""

    def __init__(self) -> None:
        self.results: list[dict] = []
        self.server_cpu, self.drivers_cpu = 0.0, 0.0

    def run(self, server, rate: float, callers: int, options: argparse.Namespace) -> float:
        """The goodput of this round, a second."""
        self.server_cpu -= server.cpu_seconds()
        self.drivers_cpu -= children_seconds()
        results = run_drivers(server.grpc, rate, callers, options)
        self.server_cpu += server.cpu_seconds()
        self.drivers_cpu += children_seconds()
        self.results += results
        return sum(r["code"] == "OK" for r in results) / options.seconds

    def summary(self, seconds: float) -> dict:
        cpu = {"server_cpu_s": self.server_cpu, "drivers_cpu_s": self.drivers_cpu}
        return summarise(self.results, seconds) | cpu


def measure(options: argparse.Namespace) -> dict:
    from lib.server import serve
    from lib.zoo import Zoo

    settings = {
        "engine.threads": max(1, (os.cpu_count() or 2) - 1),
        "engine.kv_bytes": 256 << 20,
        "engine.max_running_sequences": RUNNING,
        "limits.max_queued_requests": QUEUED,
        "log.level": "warning",
    }
    callers = RUNNING + QUEUED // 2
    with (
        tempfile.TemporaryDirectory(prefix="dorad-overload-") as folder,
        serve(Zoo(Path(folder)).model("slow"), None, settings) as server,
    ):
        phases = {"closed": Phase(), "open": Phase()}
        ratios = []
        for _ in range(options.rounds):
            capacity = phases["closed"].run(server, 0, callers, options)
            goodput = phases["open"].run(server, options.factor * capacity, 0, options)
            ratios.append(goodput / capacity)
        time_measured = options.rounds * options.seconds
        closed, opened = (phase.summary(time_measured) for phase in phases.values())
        engine = server.wire.info().engine
        left = engine.running_sequences + engine.queued_requests + engine.adapter_leases
    return {
        "seconds": options.seconds,
        "factor": options.factor,
        "tokens": options.tokens,
        "capacity": closed,
        "overload": opened,
        "rounds": options.rounds,
        "goodput_ratio": opened["goodput"] / closed["goodput"],
        "goodput_ratios": ratios,
        "left_behind": left,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--factor", type=float, default=10)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--drive", help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--callers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        call = drive(
            options.drive,
            options.rate,
            options.callers,
            options.seconds,
            options.tokens,
            options.seed,
        )
        print(json.dumps(asyncio.run(call)))
        return
    result = measure(options)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    closed, opened = result["capacity"], result["overload"]
    print(
        f"capacity   {closed['goodput']:8.1f} requests/s   p50 {closed['served_p50_s']:.2f} s"
        f"   p99 {closed['served_p99_s']:.2f} s"
    )
    print(
        f"at {options.factor:g} times {opened['goodput']:8.1f} requests/s   "
        f"p50 {opened['served_p50_s']:.2f} s   p99 {opened['served_p99_s']:.2f} s   "
        f"ratio {result['goodput_ratio']:.3f} "
        f"({', '.join(f'{ratio:.2f}' for ratio in result['goodput_ratios'])})"
    )
    print(
        f"refused    {opened['refused']} of {opened['served'] + opened['refused']}; of "
        f"{opened['refused_probes']} probes   "
        f"p50 {opened['refused_p50_ms']:.1f} ms   p99 {opened['refused_p99_ms']:.1f} ms"
    )
    for name, part in (("capacity", closed), ("overload", opened)):
        print(
            f"processor time at {name}: server {part['server_cpu_s']:.1f} s, callers "
            f"{part['drivers_cpu_s']:.1f} s, of {os.cpu_count()} cores for about "
            f"{options.rounds * (options.seconds + WARM_UP):.0f} s"
        )
    print(
        f"refusals without RetryInfo {opened['without_retry_info']}, without "
        f"grpc-retry-pushback-ms {opened['without_pushback']}, with headers "
        f"{opened['with_headers']}; other codes {opened['other_codes'] or 'none'}; "
        f"left behind {result['left_behind']}"
    )


if __name__ == "__main__":
    main()
