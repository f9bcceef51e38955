"""dorad against transformers and PEFT on the CPU, with SmolLM2, all in one run.

Greedy, 64 prompt tokens, 64 new tokens. Peers take turns (A B A B ...); medians are reported. Two
questions:

  mixed   16 sequences over 4 DoRA adapters, through gRPC in one batch, against PEFT (unmerged),
          which refuses mixed DoRA batches and so does the same work one adapter at a time, 4
          sequences each
  single  base, and one unmerged DoRA adapter of r = 16, against `transformers.generate` of the
          base and of the merged model, at batch 1 and 16

    python tests/bench/cpu_peers.py [--only single|mixed] [--ranks R...] [--json FILE]
"""
# ruff: noqa: E402 - the threads are set before torch is imported

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "client" / "src")]
THREADS = min(2, os.cpu_count() or 1)
os.environ["OMP_NUM_THREADS"] = str(THREADS)
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers
from lib import adapters
from lib.server import Server, serve
from peft import PeftModel
from rich.console import Console
from rich.table import Table

MODEL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"
PROMPT, NEW = 64, 64
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(count)
    return rng.integers(100, 40000, (count, PROMPT)).tolist()


def dorad_run(server: Server, names: list[str]) -> float:
    """Seconds for one sequence under each of the names, all at once."""
    requests = [
        dict(
            prompt=prompt,
            adapter=name,
            temperature=0.0,
            max_tokens=NEW,
            ignore_eos=True,
            bypass=True,
        )
        for name, prompt in zip(names, prompts(len(names)), strict=True)
    ]
    begin = time.perf_counter()
    answers = server.wire.generate_many(requests, timeout=600)
    seconds = time.perf_counter() - begin
    assert all(len(samples[0].tokens) == NEW for samples in answers)
    return seconds


def transformers_run(model: torch.nn.Module, batch: int) -> float:
    ids = torch.tensor(prompts(batch))
    begin = time.perf_counter()
    with torch.inference_mode():
        result = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=NEW,
            max_new_tokens=NEW,
            use_cache=True,
        )
    assert result.shape[1] == PROMPT + NEW
    return time.perf_counter() - begin


def peft_run(model: PeftModel, names: list[str]) -> float:
    """Four sequences under each adapter, one adapter after the other."""
    begin = time.perf_counter()
    for name in names:
        model.set_adapter(name)
        transformers_run(model, 4)
    return time.perf_counter() - begin


def take_turns(runs: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """The median seconds of each."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(run())
    return {name: statistics.median(values) for name, values in times.items()}


class Bench:
    def __init__(self, model: Path, scratch: Path, repeats: int, console: Console) -> None:
        self.model, self.scratch, self.repeats, self.console = model, scratch, repeats, console
        self.rows: list[dict] = []
        self.folders: dict[str, Path] = {}

    def load(self, dtype: torch.dtype) -> torch.nn.Module:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            self.model, dtype=dtype, attn_implementation="sdpa"
        )
        return model.eval()

    def make_adapters(self, names: list[str]) -> None:
        base = self.load(torch.float32)
        for name in names:
            rank, index = map(int, name.removeprefix("r").split("-"))
            kind = adapters.Kind(
                f"r{rank}",
                dict(r=rank, lora_alpha=rank, target_modules="all-linear", use_dora=True),
            )
            self.folders[name] = adapters.make(base, kind, self.scratch / name, seed=index)

    def peft(self, base: torch.nn.Module, names: list[str]) -> PeftModel:
        model = PeftModel.from_pretrained(
            copy.deepcopy(base), self.folders[names[0]], adapter_name=names[0]
        )
        for name in names[1:]:
            model.load_adapter(self.folders[name], adapter_name=name)
        return model.eval()

    def report(self, dtype: str, work: str, sequences: int, times: dict[str, float]) -> None:
        (ours, seconds), (peer, peer_seconds) = times.items()
        row = dict(
            dtype=dtype,
            work=work,
            sequences=sequences,
            seconds={ours: seconds, peer: peer_seconds},
            tokens_per_second={name: sequences * NEW / t for name, t in times.items()},
            ratio=peer_seconds / seconds,
        )
        self.rows.append(row)
        self.console.print(
            f"{dtype} {work}: {ours} {seconds:.2f} s, {peer} {peer_seconds:.2f} s,"
            f" {row['ratio']:.2f} x"
        )

    def single(self, dtype: str, server: Server, base: torch.nn.Module) -> None:
        merged = self.peft(base, ["r16-0"]).merge_and_unload().eval()
        for batch in (1, 16):
            dorad_run(server, [""] * batch)
            transformers_run(base, batch)
            base_times = take_turns(
                {
                    "dorad base": lambda batch=batch: dorad_run(server, [""] * batch),
                    "transformers base": lambda batch=batch: transformers_run(base, batch),
                },
                self.repeats,
            )
            self.report(dtype, f"base, batch {batch}", batch, base_times)
            dora_times = take_turns(
                {
                    "dorad DoRA r=16 unmerged": lambda batch=batch: dorad_run(
                        server, ["r16-0"] * batch
                    ),
                    "transformers merged": lambda batch=batch: transformers_run(merged, batch),
                },
                self.repeats,
            )
            self.report(dtype, f"DoRA r=16, batch {batch}", batch, dora_times)
            cost = take_turns(
                {
                    "dorad DoRA r=16 unmerged": lambda batch=batch: dorad_run(
                        server, ["r16-0"] * batch
                    ),
                    "dorad base": lambda batch=batch: dorad_run(server, [""] * batch),
                },
                self.repeats + 2,
            )
            ratio = cost["dorad DoRA r=16 unmerged"] / cost["dorad base"]
            self.rows.append(
                dict(dtype=dtype, work=f"cost of DoRA r=16, batch {batch}", ratio=ratio)
            )
            self.console.print(f"{dtype} DoRA r=16 costs {ratio:.2f} x of base at batch {batch}")

    def mixed(
        self,
        dtype: str,
        server: Server,
        base: torch.nn.Module,
        ranks: list[int],
        peft_repeats: int,
    ) -> None:
        for rank in ranks:
            names = [f"r{rank}-{index}" for index in range(4)]
            model = self.peft(base, names)
            dorad_run(server, names * 4)
            times = take_turns(
                {
                    "dorad, one mixed batch": lambda names=names: dorad_run(server, names * 4),
                    "PEFT, one adapter at a time": lambda names=names, model=model: peft_run(
                        model, names
                    ),
                },
                peft_repeats,
            )
            self.report(dtype, f"16 sequences, 4 DoRA r={rank}", 16, times)

    def table(self) -> Table:
        table = Table(title=f"SmolLM2-135M, {PROMPT} + {NEW} tokens, {THREADS} threads, greedy")
        for heading in ("dtype", "work", "dorad tok/s", "peer tok/s", "ratio"):
            table.add_column(heading, justify="left" if heading in ("dtype", "work") else "right")
        for row in self.rows:
            speeds = list(row.get("tokens_per_second", {}).values())
            cells = [f"{speed:.1f}" for speed in speeds] or ["", ""]
            table.add_row(row["dtype"], row["work"], *cells, f"{row['ratio']:.2f}")
        return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peft-repeats", type=int, default=2)
    parser.add_argument("--only", choices=["single", "mixed"], help="one of the two questions")
    parser.add_argument("--ranks", nargs="+", type=int, default=[16, 256], help="of mixed")
    parser.add_argument("--quick", action="store_true", help="one repeat, bf16 only")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    if options.quick:
        options.dtypes, options.repeats, options.peft_repeats = ["bf16"], 1, 1
    if not (options.model / "config.json").exists():
        sys.exit(f"{options.model} is missing: run `make assets`")

    torch.set_num_threads(THREADS)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    console = Console()
    with tempfile.TemporaryDirectory(prefix="dorad-bench-") as scratch:
        bench = Bench(options.model, Path(scratch), options.repeats, console)
        mixed = [f"r{rank}-{index}" for rank in options.ranks for index in range(4)]
        wanted = set() if options.only == "single" else set(mixed)
        bench.make_adapters(sorted(wanted | {"r16-0"}))
        for dtype in options.dtypes:
            settings = {"model.compute_dtype": dtype, "engine.threads": THREADS}
            base = bench.load(DTYPES[dtype])
            with serve(options.model, bench.folders, settings, timeout=120) as server:
                if options.only != "mixed":
                    bench.single(dtype, server, base)
                if options.only != "single":
                    bench.mixed(dtype, server, base, options.ranks, options.peft_repeats)
    console.print(bench.table())
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(bench.rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
