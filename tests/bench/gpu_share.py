"""What a trainer gets of a GPU that it shares with a server, and what is left for the server.

    DORAD_BINARY=dorad-bundle/dorad DORAD_TEST_DEVICE=cuda python tests/bench/gpu_share.py

A second process multiplies matrices without a pause, as a trainer's forward and backward passes
do. It is measured alone, and beside a server of random weights whose streams never end, at each
share of --shares (`client.limited_gpu_share`); the server is measured alone, too. The cases take
turns --repeats times, and medians are reported: the trainer's TFLOP/s and the server's tokens/s,
each also as a part of what it does alone, and the parts of the time that steps took and were held
back for.

Processes on one GPU without MPS take turns of some milliseconds, so a step beside a trainer takes
longer than one alone, and the time of the trainer's turns counts as the step's: the share is the
most that the server can have, not what it gets.

One JSON line a case, then a Markdown table. Without a GPU the server is a tiny one on the CPU and
the trainer has one thread: that tries the program, no more.
"""
# ruff: noqa: E402 - the threads are set before torch is imported

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "client" / "src"), str(ROOT / "tools")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import dorad
import make_random_model
from lib.server import Server, device, serve

TRAINER = "--trainer"
SETTLE = 1.0  # seconds after a change before it counts
COUNTERS = {
    "tokens": "dorad_generated_tokens_total",
    "stepping": "dorad_engine_step_seconds_sum",
    "held_back": "dorad_engine_throttled_seconds_total",
}


# --- The trainer's process ------------------------------------------------------------------------


def train_forever() -> None:
    """For each line on stdin, a number of seconds, works so long and prints its TFLOP/s."""
    import torch

    on_gpu = device() == "cuda"
    rows, width, out = (4096, 4096, 12288) if on_gpu else (256, 512, 512)
    kind: dict[str, Any] = {
        "device": "cuda" if on_gpu else "cpu",
        "dtype": torch.bfloat16 if on_gpu else torch.float32,
    }
    x, w = torch.randn(rows, width, **kind), torch.randn(width, out, **kind)
    y = torch.empty(rows, out, **kind)
    for line in sys.stdin:
        products, began = 0, time.perf_counter()
        end = began + float(line)
        before: Any = None
        while time.perf_counter() < end:
            for _ in range(4):
                torch.mm(x, w, out=y)
            products += 4
            if on_gpu:  # One batch ahead, so that the GPU never waits for this loop.
                now = torch.cuda.Event()
                now.record()
                if before is not None:
                    before.synchronize()
                before = now
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        print(2 * rows * width * out * products / seconds / 1e12, flush=True)


class Trainer:
    """The process, and what it says."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, TRAINER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.begin(1)  # warm-up
        self.end()

    def begin(self, seconds: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()

    def end(self) -> float:
        """TFLOP/s of what was begun."""
        assert self.process.stdout is not None
        return float(self.process.stdout.readline())

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


# --- The server's load ----------------------------------------------------------------------------


@contextlib.contextmanager
def endless_streams(client: dorad.Client, count: int, tokens: int) -> Iterator[None]:
    """So many requests at any time until the block is left."""
    over = threading.Event()

    def keep(number: int) -> None:
        prompt = [10 + (number * 7 + i) % 200 for i in range(256)]
        while not over.is_set():
            with contextlib.suppress(dorad.DoradError):  # Aborted at the end.
                client.generate(prompt, adapter="policy", max_tokens=tokens, ignore_eos=True)

    threads = [threading.Thread(target=keep, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        while any(thread.is_alive() for thread in threads):
            client.abort(all=True)
            time.sleep(0.05)


def counters(server: Server) -> dict[str, float]:
    metrics = server.metrics()
    return {key: metrics[name] for key, name in COUNTERS.items()}


def measure(
    server: Server,
    client: dorad.Client,
    trainer: Trainer | None,
    share: float | None,
    options: argparse.Namespace,
) -> dict[str, float]:
    """One case; `share` None: the server idles."""
    with contextlib.ExitStack() as stack:
        if share is not None:
            stack.enter_context(client.limited_gpu_share(share))
            stack.enter_context(endless_streams(client, options.batch, options.tokens))
            while client.info().engine.running_sequences < options.batch:
                time.sleep(0.01)
        if trainer is not None:
            trainer.begin(SETTLE)
            trainer.end()
            trainer.begin(options.seconds)
        else:
            time.sleep(SETTLE)
        before, began = counters(server), time.perf_counter()
        result = {}
        if trainer is not None:
            result["tflops"] = trainer.end()
        else:
            time.sleep(options.seconds)
        after, seconds = counters(server), time.perf_counter() - began
        if share is not None:
            rates = {key: (after[key] - before[key]) / seconds for key in COUNTERS}
            result |= {"tokens_per_second": rates.pop("tokens"), **rates}
        return result


def summarise(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians by case, with parts of what each does alone."""
    cases: dict[str, dict[str, float]] = {}
    for name, first in rounds[0].items():
        cases[name] = {key: statistics.median(r[name][key] for r in rounds) for key in first}
    for case in cases.values():
        for key, alone in (("tflops", "trainer alone"), ("tokens_per_second", "server alone")):
            if key in case:
                case[f"{key}_part"] = case[key] / cases[alone][key]
    return cases


def table(cases: dict[str, dict[str, float]]) -> str:
    def cell(case: dict[str, float], key: str) -> str:
        if key not in case:
            return ""
        part = f" ({case[f'{key}_part']:.0%})" if f"{key}_part" in case else ""
        return f"{case[key]:.{0 if case[key] >= 1000 else 3}f}{part}"

    lines = ["| | trainer, TFLOP/s | server, tokens/s | in steps | held back |", "|" + "---|" * 5]
    for name, case in cases.items():
        values = [cell(case, "tflops"), cell(case, "tokens_per_second")]
        values += [f"{case[key]:.0%}" if key in case else "" for key in ("stepping", "held_back")]
        lines.append(f"| {name} | " + " | ".join(values) + " |")
    return "\n".join(lines)


def main() -> None:
    on_gpu = device() == "cuda"
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(",")[0])
    parser.add_argument(
        "--shape", choices=make_random_model.SHAPES, default="qwen3-8b" if on_gpu else "tiny"
    )
    parser.add_argument("--rank", type=int, default=384 if on_gpu else 16)
    parser.add_argument("--kv-bytes", type=int, default=20_000_000_000 if on_gpu else 1 << 28)
    parser.add_argument("--batch", type=int, default=32 if on_gpu else 2, help="streams")
    parser.add_argument("--tokens", type=int, default=512, help="of a stream, then comes another")
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.5, 0.25])
    parser.add_argument("--stream-priority", choices=("high", "normal", "low"), default="high")
    parser.add_argument("--seconds", type=float, default=5.0, help="of one measurement")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    settings = {
        "engine.kv_bytes": options.kv_bytes,
        "engine.stream_priority": options.stream_priority,
    }
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="dorad-bench-", dir=in_memory) as scratch:
        model, adapter = Path(scratch) / "model", Path(scratch) / "adapter"
        make_random_model.write_model(make_random_model.SHAPES[options.shape], model)
        make_random_model.write_adapter(
            make_random_model.SHAPES[options.shape], options.rank, adapter
        )
        with (
            serve(model, {"policy": adapter}, settings, timeout=300) as server,
            dorad.Client(server.grpc) as client,
            contextlib.ExitStack() as stack,
        ):
            trainer = Trainer()
            stack.callback(trainer.stop)
            plan: dict[str, tuple[Trainer | None, float | None]] = {
                "trainer alone": (trainer, None),
                "server alone": (None, 1.0),
            }
            plan |= {f"both, share {share:g}": (trainer, share) for share in options.shares}
            rounds = []
            for _ in range(options.repeats):
                results = {}
                for name, (beside, share) in plan.items():
                    results[name] = measure(server, client, beside, share, options)
                    line = {k: round(v, 4) for k, v in results[name].items()}
                    print(json.dumps({"case": name, **line}), flush=True)
                rounds.append(results)
    print(table(summarise(rounds)))


if __name__ == "__main__":
    if TRAINER in sys.argv:
        train_forever()
    else:
        main()
