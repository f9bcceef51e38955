"""The norm of QDoRA over one matrix that bitsandbytes has quantised: time and memory, with PEFT's.

    python tests/bench/train_quantised.py [--shape 12288 4096] [--rank 384] [--kinds nf4 int8]

Norms alone, as a forward computes them, by turns; factors in fp32, PEFT's weight dequantised to
fp32, which is the dtype of its factors. Memory is what is allocated at the peak beyond weights and
factors. A Markdown table goes to stderr, one JSON object to stdout.
"""
# ruff: noqa: E402 - the threads are set before torch is imported

import argparse
import importlib.metadata
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "client" / "src"), str(ROOT / "tests")]
os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import bitsandbytes as bnb
import torch
from dorad.train._quantised import QuantisedWeight
from lib.peak import peak_bytes
from peft.tuners.lora.dora import DoraLinearLayer


def linear(kind: str, out: int, width: int, device: str) -> Any:
    if kind == "nf4":
        made = bnb.nn.Linear4bit(width, out, bias=False, quant_type="nf4")
    else:
        made = bnb.nn.Linear8bitLt(width, out, bias=False, has_fp16_weights=False)
    made = made.to(device)  # quantises
    if kind == "int8":
        made.init_8bit_state()
    return made


def norms(base: Any, a: Any, b: Any) -> dict[str, Callable[[], torch.Tensor]]:
    layer = DoraLinearLayer(False)

    @torch.no_grad()
    def peft() -> torch.Tensor:
        product = layer.get_lora_weight(lora_A=a, lora_B=b)
        if hasattr(base.weight, "quant_state"):
            weight = bnb.functional.dequantize_4bit(base.weight.data, base.weight.quant_state)
        else:
            weight = bnb.functional.int8_vectorwise_dequant(base.weight.data, base.state.SCB)
        return layer.get_weight_norm(weight, product, 2.0)

    return {"peft": peft, "patched": lambda: QuantisedWeight(base).norm(a.weight, b.weight, 2.0)}


def measured(options: argparse.Namespace, kind: str) -> dict[str, Any]:
    torch.manual_seed(0)
    out, width = options.shape
    base = linear(kind, out, width, options.device)
    with torch.device(options.device):
        a = torch.nn.Linear(width, options.rank, bias=False)
        b = torch.nn.Linear(options.rank, out, bias=False)
    torch.nn.init.normal_(b.weight, std=0.01)
    functions = norms(base, a, b)
    results = {name: function() for name, function in functions.items()}
    apart = (results["peft"] - results["patched"]).abs().max() / results["peft"].max()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(options.repeats):
        for name, function in functions.items():
            began = time.perf_counter()
            function()
            if options.device == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - began)
    peaks = {n: peak_bytes(function, options.device) for n, function in functions.items()}
    return {
        "kind": kind,
        "relative_difference": apart.item(),
        "ms": {name: round(1e3 * statistics.median(s), 2) for name, s in seconds.items()},
        "peak_mb": {name: round(peak / 1e6, 1) for name, peak in peaks.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--shape", type=int, nargs=2, default=[12288, 4096])
    parser.add_argument("--rank", type=int, default=384)
    parser.add_argument("--kinds", nargs="+", choices=("nf4", "int8"), default=["nf4", "int8"])
    parser.add_argument("--repeats", type=int, default=20 if cuda else 3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    options = parser.parse_args()
    print("| weight | PEFT | patched | × | PEFT's peak | patched |", file=sys.stderr)
    print("|" + "---|" * 6, file=sys.stderr)
    results = []
    for kind in options.kinds:
        result = measured(options, kind)
        results.append(result)
        ms, peak = result["ms"], result["peak_mb"]
        print(
            f"| {kind} | {ms['peft']:.1f} ms | {ms['patched']:.1f} ms |"
            f" {ms['peft'] / ms['patched']:.2f} | {peak['peft']:.0f} MB |"
            f" {peak['patched']:.0f} MB |",
            file=sys.stderr,
            flush=True,
        )
    facts = {**vars(options), "threads": torch.get_num_threads(), "load": os.getloadavg()[0]}
    facts |= {p: importlib.metadata.version(p) for p in ("torch", "peft", "bitsandbytes")}
    print(json.dumps({"surroundings": facts, "results": results}, indent=1))


if __name__ == "__main__":
    main()
