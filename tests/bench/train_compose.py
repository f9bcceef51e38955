"""Compose and its backward on a GPU: dorad.train's kernels, plain torch, and a copy, in one run.

    python tests/bench/train_compose.py [--rows 8192 ...] [--out 8192 ...] [--dtype bf16]

  eager    what PEFT computes, (g - 1)·base + g·lora·s in the tensors' dtype, and autograd's
           backward through it with the magnitude's gradient
  fp32     the same in fp32 with one rounding, as this package's eager tier computes it
  fused    the kernels

Calls take turns; medians of CUDA events. The share of the copy's bandwidth is over the bytes that
must move: forward two tensors read and two written (what the backward needs is kept), backward two
and two. One JSON object goes to stdout: of each shape, rows x out, and the geometric means of eager
over fused.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "client" / "src"), str(ROOT / "tests")]

import torch  # noqa: E402
from dorad.train import _compose, _native, compose, tier  # noqa: E402
from lib.device_time import device_seconds  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCALING = 1.5


class Bench:
    def __init__(self, rows: int, out: int, dtype: torch.dtype) -> None:
        self.base, self.lora, self.grad = (
            torch.randn(rows, out, device="cuda", dtype=dtype) for _ in range(3)
        )
        self.g = 1 + 0.01 * torch.randn(out, device="cuda")
        self.bytes = self.base.numel() * self.base.element_size()

    def leaves(self) -> list[torch.Tensor]:
        return [t.detach().requires_grad_() for t in (self.base, self.lora, self.g)]

    def eager(self, leaves: list[torch.Tensor]) -> torch.Tensor:
        base, lora, g = leaves
        narrow = g.to(base.dtype)
        return (narrow - 1) * base + narrow * lora * SCALING

    def fp32(self, leaves: list[torch.Tensor]) -> torch.Tensor:
        return _compose.compose_eager(*leaves, SCALING)

    def fused(self, leaves: list[torch.Tensor]) -> torch.Tensor:
        with tier("fused"):
            return compose(*leaves, SCALING)


def milliseconds(call) -> float:
    return 1e3 * device_seconds(call, "cuda")


def measured(bench: Bench, copy_rate: float, repeats: int) -> dict:
    ways = {"eager": bench.eager, "fp32": bench.fp32, "fused": bench.fused}
    times: dict[str, list[float]] = {}
    for repeat in range(repeats + 3):
        sample = {}
        for name, way in ways.items():
            leaves = bench.leaves()
            made: list[torch.Tensor] = []

            def forward(way=way, leaves=leaves, made=made) -> None:
                made.append(way(leaves))

            def backward(leaves=leaves, made=made) -> None:
                torch.autograd.grad(made[0], leaves, bench.grad)

            sample[f"{name} forward"] = milliseconds(forward)
            sample[f"{name} backward"] = milliseconds(backward)
        for name, value in sample.items():
            if repeat >= 3:
                times.setdefault(name, []).append(value)
    medians = {name: statistics.median(values) for name, values in times.items()}
    results = {}
    for name in ("forward", "backward"):
        fused = medians[f"fused {name}"]
        results[name] = {
            **{way: round(medians[f"{way} {name}"], 4) for way in ways},
            "eager_over_fused": round(medians[f"eager {name}"] / fused, 2),
            "fp32_over_fused": round(medians[f"fp32 {name}"] / fused, 2),
            "share_of_copy": round(4 * bench.bytes / fused / copy_rate, 3),
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[8192])
    parser.add_argument("--out", type=int, nargs="+", default=[8192])
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    assert _native.library is not None, "build libdorad_train.so first"
    from_, to = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    copies = [milliseconds(lambda: to.copy_(from_)) for _ in range(options.repeats)]
    copy_rate = 2 * from_.numel() / statistics.median(copies)  # bytes a millisecond
    results = {
        f"{rows} x {out}": measured(
            Bench(rows, out, DTYPES[options.dtype]), copy_rate, options.repeats
        )
        for rows in options.rows
        for out in options.out
    }
    means = {
        name: round(
            statistics.geometric_mean(each[name]["eager_over_fused"] for each in results.values()),
            2,
        )
        for name in ("forward", "backward")
    }
    facts = {**vars(options), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    facts |= {"copy_tb_s": round(copy_rate * 1e-9, 3)}
    facts |= {"date": time.strftime("%Y-%m-%d", time.gmtime())}
    print(json.dumps({"surroundings": facts, "means": means, "milliseconds": results}, indent=1))


if __name__ == "__main__":
    main()
