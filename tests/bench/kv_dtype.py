"""How far a KV cache in eight bits (engine.kv_dtype fp8) moves log-probabilities, on real text.

    python tests/bench/kv_dtype.py --model FOLDER --adapter FOLDER

One server with each cache, $DORAD_BINARY on a GPU. Prompts of tests/lib/task_prompts.py are
answered at a temperature of 1 from the cache in bf16, and all answers are scored by both caches and
by a server on the CPU in fp32. Printed for both caches, against fp32: the mean and the 99th
percentile of |Δ log-probability| of the answers' tokens, and the KL of a token, estimated as the
mean of r - 1 - log r. And of both caches the share of greedy answers, of --tokens tokens, whose
first tokens are those of fp32: up to the first other one.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "client" / "src"), str(ROOT / "tools")]

from dorad.text import ModelText  # noqa: E402
from lib.server import Server, serve  # noqa: E402
from lib.task_prompts import KINDS, task_prompts  # noqa: E402

NAME = "policy"
SERVERS = {
    "fp32": {"model.device": "cpu", "model.compute_dtype": "fp32"},
    "bf16": {"model.device": "cuda"},
    "fp8": {"model.device": "cuda", "engine.kv_dtype": "fp8"},
}


@contextmanager
def server_of(cache: str, options: argparse.Namespace) -> Iterator[Server]:
    adapters = {NAME: options.adapter} if options.adapter else {}
    with serve(options.model, adapters, SERVERS[cache], timeout=120) as server:
        yield server


def answer(server: Server, prompts: list[list[int]], options: argparse.Namespace, **how: Any):
    adapter = NAME if options.adapter else ""
    wanted = [
        dict(prompt=prompt, adapter=adapter, seed=i, max_tokens=options.tokens, ignore_eos=True)
        | how
        for i, prompt in enumerate(prompts)
    ]
    return [sample.tokens for (sample,) in server.wire.generate_many(wanted, timeout=600)]


def score(server: Server, prompts: list[list[int]], answers: list[list[int]], adapter: str):
    """Of all answers' tokens, one after the other."""
    parts = []
    for prompt, tokens in zip(prompts, answers, strict=True):
        ((scored,),) = server.wire.score([prompt + tokens], [adapter], temperature=1.0)
        parts.append(scored.logprobs[len(prompt) :].astype(np.float64))
    return np.concatenate(parts)


def kept(greedy: list[list[int]], reference: list[list[int]]) -> float:
    equal = 0
    for ours, theirs in zip(greedy, reference, strict=True):
        same = np.asarray(ours) == np.asarray(theirs)
        equal += len(same) if same.all() else int(np.argmin(same))
    return equal / sum(map(len, reference))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    options = parser.parse_args(arguments)
    text = ModelText(options.model)
    prompts = [prompt for kind in KINDS for prompt in task_prompts(text, kind)]
    adapter = NAME if options.adapter else ""
    with server_of("bf16", options) as server:
        answers = answer(server, prompts, options, temperature=1.0)
    scores, greedy = {}, {}
    for cache in SERVERS:
        with server_of(cache, options) as server:
            scores[cache] = score(server, prompts, answers, adapter)
            greedy[cache] = answer(server, prompts, options, temperature=0.0)
    for cache in ("bf16", "fp8"):
        ratio = scores[cache] - scores["fp32"]
        row = {
            "cache": cache,
            "tokens": len(ratio),
            "mean": round(float(np.abs(ratio).mean()), 5),
            "p99": round(float(np.quantile(np.abs(ratio), 0.99)), 4),
            "kl": float(f"{np.mean(np.expm1(ratio) - ratio):.3g}"),
            "greedy": round(kept(greedy[cache], greedy["fp32"]), 3),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
