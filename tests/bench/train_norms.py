"""DoRA's norm of one linear: PEFT's, and dorad.train's, in one run: time and memory.

    python tests/bench/train_norms.py [--dtypes fp32 bf16] [--repeats 20]

The shapes and ranks are the paper's (table "Norm memory"). PEFT's is its DoraLinearLayer's: B·A
from its own product of both, and the norm of W + s·B·A. Calls take turns; medians, on CUDA of the
device's time. Memory is the peak beyond W, A and B. `apart` is the largest relative difference of
each from the norm in fp64. A Markdown table goes to stderr, one JSON object to stdout.
"""

import argparse
import importlib.metadata
import json
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "client" / "src"), str(ROOT / "tests")]

import torch  # noqa: E402
from dorad.train import weight_norm  # noqa: E402
from lib.device_time import device_seconds  # noqa: E402
from lib.peak import peak_bytes  # noqa: E402
from peft.tuners.lora.dora import DoraLinearLayer  # noqa: E402
from torch import nn  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SCALING = 2.0
CASES = [  # out, in, rank
    (4096, 4096, 64),
    (4096, 4096, 384),
    (4096, 4096, 512),
    (8192, 8192, 384),
    (8192, 8192, 512),
    (8192, 8192, 768),
    (4096, 11008, 384),
    (8192, 28672, 384),
]


class Case:
    def __init__(self, out: int, width: int, rank: int, dtype: torch.dtype, device: str) -> None:
        made = torch.Generator().manual_seed(0)

        def randn(*shape: int, std: float) -> torch.Tensor:
            return (torch.randn(shape, generator=made) * std).to(device, dtype)

        self.device = device
        self.weight = randn(out, width, std=width**-0.5)
        self.a, self.b = (
            nn.Linear(*shape, bias=False, device=device, dtype=dtype)
            for shape in ((width, rank), (rank, out))
        )
        with torch.no_grad():
            self.a.weight.copy_(randn(rank, width, std=width**-0.5))
            self.b.weight.copy_(randn(out, rank, std=0.1 * rank**-0.5))
        self.layer = DoraLinearLayer(fan_in_fan_out=False)

    @torch.no_grad()
    def peft(self) -> torch.Tensor:
        product = self.layer.get_lora_weight(lora_A=self.a, lora_B=self.b, adapter_name="default")
        norm: torch.Tensor = self.layer.get_weight_norm(
            self.weight, product, SCALING, adapter_name="default"
        )
        return norm

    def ours(self) -> torch.Tensor:
        return weight_norm(self.weight, self.a.weight, self.b.weight, SCALING)

    def exact(self) -> torch.Tensor:
        with torch.no_grad():
            product = self.b.weight.double() @ self.a.weight.double()
            return torch.linalg.vector_norm(self.weight.double() + SCALING * product, dim=1)


def measured(case: Case, repeats: int) -> dict:
    ways = {"peft": case.peft, "ours": case.ours}
    exact = case.exact()
    times: dict[str, list[float]] = {name: [] for name in ways}
    result: dict = {}
    for name, way in ways.items():
        apart = float(((way().double() - exact).abs() / exact).max())
        result[name] = {"apart": apart, "peak_mb": round(peak_bytes(way, case.device) / 1e6, 2)}
    for _ in range(repeats):
        for name, way in ways.items():
            times[name].append(device_seconds(way, case.device))
    for name in ways:
        result[name]["ms"] = round(1e3 * statistics.median(times[name]), 4)
    result["times"] = round(result["peft"]["ms"] / result["ours"]["ms"], 2)
    result["memory"] = round(result["peft"]["peak_mb"] / result["ours"]["peak_mb"], 1)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--repeats", type=int, default=20 if cuda else 3)
    parser.add_argument("--cases", type=int, default=len(CASES), help="the first ones alone")
    options = parser.parse_args()
    print(
        "| W, rank | PEFT | ours | × | PEFT's peak | ours | × | apart: PEFT, ours |",
        file=sys.stderr,
    )
    print("|" + "---|" * 8, file=sys.stderr)
    results = {}
    for dtype in options.dtypes:
        for out, width, rank in CASES[: options.cases]:
            case = Case(out, width, rank, DTYPES[dtype], options.device)
            name = f"{out} x {width}, r = {rank}, {dtype}"
            results[name] = found = measured(case, options.repeats)
            peft, ours = found["peft"], found["ours"]
            print(
                f"| {name} | {peft['ms']:.3f} ms | {ours['ms']:.3f} ms | {found['times']} |"
                f" {peft['peak_mb']:.0f} MB | {ours['peak_mb']:.1f} MB | {found['memory']} |"
                f" {peft['apart']:.1e}, {ours['apart']:.1e} |",
                file=sys.stderr,
            )
            del case
    facts = {**vars(options), "date": time.strftime("%Y-%m-%d", time.gmtime())}
    facts |= {p: importlib.metadata.version(p) for p in ("torch", "peft")}
    if options.device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
    print(json.dumps({"surroundings": facts, "results": results}, indent=1))


if __name__ == "__main__":
    main()
