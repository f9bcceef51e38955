"""A rollout batch as RL libraries send it, each prompt several times at once, against a server of
its own with random weights: how many prompt tokens are computed, and the time until all answers are
there, against the same batch without sharing (`bypass_prefix_cache`).

    DORAD_BINARY=dorad-bundle/dorad DORAD_TEST_DEVICE=cuda \\
        python tests/bench/repeated_prompts.py --shape qwen3-8b

`in rounds` sends all prompts once, then again. One JSON line for each batch; `bitwise` says whether
all tokens and log-probabilities are those without sharing.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "client" / "src"), str(ROOT / "tools")]

import make_random_model  # noqa: E402
import numpy as np  # noqa: E402
from lib.server import PORTS, Server, binary, device, options, start  # noqa: E402
from lib.wire import RAW  # noqa: E402


def prompts(args: argparse.Namespace, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    low, high = args.prompt
    return [
        rng.integers(10, 900, rng.integers(low, high + 1)).tolist() for _ in range(args.prompts)
    ]


def run(server: Server, wanted: list[list[int]], tokens: int, *, shares: bool) -> dict:
    before = server.metric("dorad_prompt_tokens_total", source="computed")
    requests = [
        dict(
            prompt=prompt,
            seed=seed,
            max_tokens=tokens,
            ignore_eos=True,
            logprobs=RAW,
            bypass=not shares,
        )
        for seed, prompt in enumerate(wanted)
    ]
    begin = time.perf_counter()
    answers = server.wire.generate_many(requests, timeout=600)
    seconds = time.perf_counter() - begin
    computed = server.metric("dorad_prompt_tokens_total", source="computed") - before
    return dict(
        seconds=seconds,
        computed=computed,
        answers=[(samples[0].tokens, samples[0].logprobs.tobytes()) for samples in answers],
    )


def measure(server: Server, order: str, args: argparse.Namespace, seed: int) -> dict:
    made = prompts(args, seed)
    distinct = sum(len(prompt) for prompt in made)
    in_rounds = order == "in rounds"
    wanted = made * args.each if in_rounds else [p for p in made for _ in range(args.each)]
    shared = run(server, wanted, args.tokens, shares=True)
    alone = run(server, wanted, args.tokens, shares=False)
    return {
        "order": order,
        "requests": len(wanted),
        "distinct_tokens": distinct,
        "computed_over_distinct": round(shared["computed"] / distinct, 4),
        "without_sharing": round(alone["computed"] / distinct, 4),
        "seconds": round(shared["seconds"], 3),
        "seconds_without_sharing": round(alone["seconds"], 3),
        "bitwise": shared["answers"] == alone["answers"],
    }


def main() -> None:
    on_gpu = device() == "cuda"
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument(
        "--shape", choices=make_random_model.SHAPES, default="qwen3-8b" if on_gpu else "tiny"
    )
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--each", type=int, default=8)
    parser.add_argument(
        "--prompt", type=int, nargs=2, default=[200, 940], metavar=("LEAST", "MOST")
    )
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="dorad-bench-", dir=in_memory) as folder:
        scratch = Path(folder)
        make_random_model.write_model(make_random_model.SHAPES[args.shape], scratch / "model")
        line = [str(binary()), "serve", str(scratch / "model"), *options(PORTS)]
        server = start(line, scratch / "server.log", timeout=300)
        try:
            for turn, order in enumerate(["one after the other", "in rounds"]):
                print(json.dumps(measure(server, order, args, seed=turn)), flush=True)
        finally:
            server.wire.close()
            server.stop()


if __name__ == "__main__":
    main()
