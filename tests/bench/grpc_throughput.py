"""Tokens a second through gRPC: streaming requests of one adapter against a server of its own, with
random weights, and what the times of its steps would allow.

    dorad-bundle/run cuda_step_bench --adapters 1 --context 640 --prefill 2048 > steps.jsonl
    DORAD_BINARY=dorad-bundle/dorad DORAD_TEST_DEVICE=cuda \\
        python tests/bench/grpc_throughput.py --steps steps.jsonl

Each number of sequences is one batch that starts together. One JSON line each: `bound` is the
tokens over (one decode step for each token, at the mean context, and the prompts' prefill), both
taken from --steps; `busy` is the share of the time in which the server had a step under way.

--defaults runs everything twice in turns: against a server with the settings below, and against
`dorad serve MODEL` without any; it ends with the ratios of their tokens a second. --rollout adds a
batch of so many samples: prompts of 128 to 1,024 tokens, answers of 529 in the mean (lognormal, at
most 4,096).
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "client" / "src"), str(ROOT / "tools")]

import make_random_model  # noqa: E402
from dorad import load  # noqa: E402
from lib.server import PORTS, Server, binary, command, device, options, start  # noqa: E402

# Sequences that one client process reads.
SEQUENCES_A_CLIENT = 32
ROLLOUT_PROMPT, ROLLOUT_ANSWER = "128:1024", "lognormal:529:0.8:4096"


def make_plan(sequences: int, prompt: str, tokens: str) -> load.Plan:
    return load.Plan(
        prompt=load.Lengths.parse(prompt),
        output=load.Lengths.parse(tokens),
        popularity=load.Popularity.parse(["policy"], None),
        concurrency=sequences,
        requests=sequences,
        seed=sequences,
    )


def read_steps(path: Path) -> tuple[dict[int, float], float]:
    """From cuda_step_bench's lines: seconds of a decode step by batch, and of prefill by token."""
    decode, prefill = {}, 0.0
    for line in path.read_text().splitlines():
        case = json.loads(line)
        if case.get("work") == "decode":
            decode[case["batch"]] = case["ms"] / 1e3
        elif case.get("work") == "prefill":
            prefill = case["ms"] / 1e3 / case["tokens"]
    return decode, prefill


def bound(sequences: int, args: argparse.Namespace) -> float:
    decode, prefill = read_steps(args.steps)
    seconds = (args.tokens - 1) * decode[sequences] + sequences * args.prompt * prefill
    return sequences * args.tokens / seconds


def measure(server: Server, plan: load.Plan) -> dict:
    sequences = plan.requests
    before = server.metric("dorad_engine_step_seconds_sum")
    steps = server.metric("dorad_engine_step_seconds_count")
    processes = -(-sequences // SEQUENCES_A_CLIENT)
    report = load.run_processes(load.Grpc(server.grpc), plan, processes)
    seconds = report["seconds"]
    stepping = server.metric("dorad_engine_step_seconds_sum") - before
    steps = server.metric("dorad_engine_step_seconds_count") - steps
    refused = report["refused"]
    assert report["failed"] == refused["requests"] == 0, (report["errors"], refused["reasons"])
    tokens = report["generated_tokens"]
    result = {
        "sequences": sequences,
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
        "steps": int(steps),
        "busy": round(stepping / seconds, 3),
    }
    # Answers of few tokens may come in one message, and have no gaps.
    if gap := report["itl_ms"]:
        result["p50_gap_ms"], result["p99_gap_ms"] = round(gap["p50"], 2), round(gap["p99"], 2)
    result["client_bound"] = report["generator"]["bottleneck"]
    return result


def measure_batch(server: Server, sequences: int, args: argparse.Namespace) -> dict:
    result = measure(server, make_plan(sequences, str(args.prompt), str(args.tokens)))
    assert result["tokens"] == sequences * args.tokens
    if args.steps:
        result["bound"] = round(bound(sequences, args), 1)
        result["share"] = round(result["tokens_per_second"] / result["bound"], 3)
    return result


@contextmanager
def running(line: list[str], scratch: Path) -> Iterator[Server]:
    began = time.monotonic()
    server = start(line, scratch / "server.log", timeout=300)
    print(json.dumps({"ready_seconds": round(time.monotonic() - began, 2)}), flush=True)
    try:
        yield server
    finally:
        server.wire.close()
        server.stop()


def measure_all(line: list[str], scratch: Path, args: argparse.Namespace) -> dict[str, float]:
    """Prints one line a batch. Returns tokens a second by batch."""
    found = {}
    with running(line, scratch) as server:
        measure(server, make_plan(1, str(args.prompt), "16"))  # warms up
        for sequences in args.sequences:
            result = measure_batch(server, sequences, args)
            print(json.dumps(result), flush=True)
            found[str(sequences)] = result["tokens_per_second"]
        if args.rollout:
            result = measure(server, make_plan(args.rollout, ROLLOUT_PROMPT, ROLLOUT_ANSWER))
            print(json.dumps({"work": "rollout"} | result), flush=True)
            found["rollout"] = result["tokens_per_second"]
    return found


def main() -> None:
    shapes = make_random_model.SHAPES
    on_gpu = device() == "cuda"
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--shape", choices=shapes, default="qwen3-8b" if on_gpu else "tiny")
    parser.add_argument("--rank", type=int, default=384 if on_gpu else 16)
    parser.add_argument(
        "--sequences",
        default=[1, 32, 128, 256],
        type=lambda text: [int(n) for n in text.split(",")],
    )
    parser.add_argument("--rollout", type=int, help="also a batch of so many samples")
    parser.add_argument("--defaults", action="store_true", help="and a server without settings")
    parser.add_argument("--turns", type=int, default=1, help="with --defaults")
    parser.add_argument("--prompt", type=int, default=128, help="tokens in")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens out, of each sequence")
    parser.add_argument("--steps", type=Path, help="cuda_step_bench's output of the same machine")
    parser.add_argument("--kv-bytes", type=int, default=48_000_000_000 if on_gpu else 1 << 30)
    parser.add_argument("--step-tokens", type=int, default=2048)
    args = parser.parse_args()
    settings = {
        "engine.kv_bytes": args.kv_bytes,
        "engine.max_step_tokens": args.step_tokens,
        "engine.max_running_sequences": max(args.sequences),
    }
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="dorad-bench-", dir=in_memory) as scratch:
        model, adapter = Path(scratch) / "model", Path(scratch) / "adapter"
        make_random_model.write_model(shapes[args.shape], model)
        make_random_model.write_adapter(shapes[args.shape], args.rank, adapter)
        lines = {"tuned": command(model, {"policy": adapter}, settings)}
        if args.defaults:
            lines["defaults"] = [str(binary()), "serve", str(model), *options(PORTS)]
            lines["defaults"] += ["--adapter", f"policy={adapter}"]
        found: dict[str, list[dict[str, float]]] = {name: [] for name in lines}
        for _ in range(args.turns):
            for name, line in lines.items():
                print(json.dumps({"server": name}), flush=True)
                found[name].append(measure_all(line, Path(scratch), args))
        if args.defaults:
            medians = {
                name: {batch: statistics.median(run[batch] for run in runs) for batch in runs[0]}
                for name, runs in found.items()
            }
            ratios = {
                batch: round(medians["defaults"][batch] / tuned, 4)
                for batch, tuned in medians["tuned"].items()
            }
            print(json.dumps({"defaults_over_tuned": ratios}), flush=True)


if __name__ == "__main__":
    main()
