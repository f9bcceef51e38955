"""A training step of a stack of DoRA linears: PEFT, and PEFT with dorad.train, all in one run.

    python tests/bench/train_peft.py [--shape qwen3-8b] [--layers 2] [--rank 384]
        [--tokens 512 2048 ...]

  base     the frozen base alone: forward, and the backward to the input
  lora     PEFT's LoRA of the same rank
  dora     PEFT's DoRA
  eager    the same after dorad.train.patch, composed in plain torch operations
  fused    never eager (on CUDA that needs libdorad_train.so): here each linear is one function
  patched  as a trainer gets it: each layer takes the tier that its size asks for

A layer is the seven linears of a decoder, with additions in the place of attention, and no
optimizer step. Every configuration has the same weights. They take turns (A B A B ...); medians are
reported. Memory is the peak of what a step allocates beyond what was there before it: CUDA's own
count, on the CPU the sum over the profiler's allocations. `norms_ms` is the time of all layers'
norms alone, as a forward takes them; on CUDA the device's time, without the host's.

A line for each number of tokens goes to stderr, with PEFT's time to the patched model's; the goal
is at least 2. One JSON object goes to stdout, `results` by tokens.

Without a GPU the default is SmolLM2-135M's shape.
"""
# ruff: noqa: E402 - the threads are set before torch is imported

import argparse
import contextlib
import importlib.metadata
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "client" / "src"), str(ROOT / "tests")]
os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import dorad.train
import torch
from lib.device_time import device_seconds
from lib.peak import peak_bytes
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from torch import nn
from torch.utils.checkpoint import checkpoint

SHAPES = json.loads((ROOT / "tools" / "model_shapes.json").read_text())
SHAPES["smollm2"] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NAMES = ["base", "lora", "dora", "eager", "fused", "patched"]
GOAL = 2.0  # PEFT's DoRA to patched, in time
LINEARS = ["q", "k", "v", "o", "gate", "up", "down"]


class Layer(nn.Module):
    def __init__(self, shape: dict, factory: dict) -> None:
        super().__init__()
        hidden, inner = shape["hidden_size"], shape["intermediate_size"]
        self.repeats = shape["num_attention_heads"] // shape["num_key_value_heads"]
        kv = shape["num_key_value_heads"] * shape["head_dim"]
        self.q = nn.Linear(hidden, kv * self.repeats, **factory)
        self.k, self.v = (nn.Linear(hidden, kv, **factory) for _ in range(2))
        self.o = nn.Linear(kv * self.repeats, hidden, **factory)
        self.gate, self.up = (nn.Linear(hidden, inner, **factory) for _ in range(2))
        self.down = nn.Linear(inner, hidden, **factory)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.q(x) + (self.k(x) + self.v(x)).repeat(1, self.repeats)
        x = x + self.o(mixed)
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Stack(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        factory = dict(bias=False, device=options.device, dtype=DTYPES[options.dtype])
        shape = SHAPES[options.shape]
        self.layers = nn.ModuleList(Layer(shape, factory) for _ in range(options.layers))
        self.checkpointed = options.checkpoint

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


def make(name: str, options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    model = Stack(options)
    if name == "base":
        return model.requires_grad_(False)
    config = LoraConfig(
        r=options.rank, lora_alpha=2 * options.rank, target_modules=LINEARS, use_dora=name != "lora"
    )
    model = get_peft_model(model, config, autocast_adapter_dtype=not options.half_adapters)
    torch.manual_seed(1)
    with torch.no_grad():  # Adapters that do something, or agreement would mean nothing.
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_(std=0.02 * options.rank**-0.5)
            elif "magnitude" in key:
                parameter.mul_(0.9 + 0.2 * torch.rand_like(parameter))
    if name in ("eager", "fused", "patched"):
        dorad.train.patch(model)
    return model


class Case:
    """One configuration, ready to make steps."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.device = options.device
        self.model = make(name, options)
        self.width, self.dtype = SHAPES[options.shape]["hidden_size"], DTYPES[options.dtype]
        self.has_norms = name not in ("base", "lora")
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        # Changes nothing, but what is kept for the time of a step is made anew.
        self.optimizer = torch.optim.SGD(self.parameters or [torch.zeros(1)], lr=0)
        self.tier = {"eager": "eager", "fused": "fused"}.get(name, "auto")
        kind = torch.device(options.device).type
        self.autocast: Callable[[], contextlib.AbstractContextManager] = lambda: torch.autocast(
            kind, torch.bfloat16, enabled=options.autocast
        )

    def take(self, tokens: int) -> None:
        """What `step` works on from here on."""
        made = torch.Generator().manual_seed(2)
        x = torch.randn(tokens, self.width, generator=made).to(self.device, self.dtype)
        self.x, self.grad = x.requires_grad_(), torch.ones_like(x)

    def zero_grad(self) -> None:
        """As an optimizer does it, which has a list of its parameters."""
        for parameter in (self.x, *self.parameters):
            parameter.grad = None

    def step(self) -> torch.Tensor:
        """A forward and a backward; `begin` precedes each."""
        self.zero_grad()
        with dorad.train.tier(self.tier):
            with self.autocast():
                output = self.model(self.x)
            output.backward(self.grad.to(output.dtype))
        return output

    def begin(self) -> None:
        """As after an optimizer's step."""
        self.optimizer.step()

    def norms(self) -> None:
        """The norms of one forward: PEFT's as its DoraLinearLayer takes them, or ours."""
        ours = {layer for layer, why in dorad.train.explain(self.model, 1).items() if why.tier}
        with torch.no_grad(), self.autocast():
            for name, module in self.model.named_modules():
                if not isinstance(module, LoraLayer):
                    continue
                a, b = module.lora_A["default"], module.lora_B["default"]
                weight, scaling = module.get_base_layer().weight, module.scaling["default"]
                if f"{name}[default]" in ours:
                    dorad.train.weight_norm(weight, a.weight, b.weight, scaling)
                    continue
                dora = module.lora_magnitude_vector["default"]
                product = dora.get_lora_weight(lora_A=a, lora_B=b, adapter_name="default")
                x_dtype = a.weight.dtype  # to which PEFT casts the layer's input
                dora.get_weight_norm(
                    weight.to(x_dtype), product.to(x_dtype), scaling, adapter_name="default"
                )

    def seconds(self, work: Callable[[], object]) -> float:
        self.synchronize()
        began = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - began

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def peak_bytes(self) -> int:
        self.begin()
        self.zero_grad()
        return peak_bytes(self.step, self.device)


def tiers(case: Case, rows: int) -> dict[str, int]:
    """How many layers take each tier."""
    taken = [str(why.tier) for why in dorad.train.explain(case.model, rows).values()]
    return {name: taken.count(name) for name in sorted(set(taken))}


def measured(cases: dict[str, Case], tokens: int, repeats: int) -> dict[str, dict]:
    """What each case does with so many tokens."""
    for case in cases.values():
        case.take(tokens)
    outputs = {}
    for name, case in cases.items():
        for _ in range(2):  # and warm-up
            outputs[name] = case.step().detach().float()
            case.begin()
    times: dict[str, list[float]] = {name: [] for name in cases}
    norms: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, case in cases.items():
            case.begin()
            times[name].append(case.seconds(case.step))
            if case.has_norms:
                norms[name].append(device_seconds(case.norms, case.device))
    results: dict[str, dict] = {}
    for name, case in cases.items():
        result: dict = {
            "ms": round(1e3 * statistics.median(times[name]), 3),
            "ms_min": round(1e3 * min(times[name]), 3),
            "ms_max": round(1e3 * max(times[name]), 3),
            "peak_mib": round(case.peak_bytes() / 2**20, 1),
        }
        if norms[name]:
            result["norms_ms"] = round(1e3 * statistics.median(norms[name]), 3)
        if case.tier == "auto" and name == "patched":
            result["tiers"] = tiers(case, tokens)
        if "dora" in outputs and name not in ("base", "lora"):
            far = (outputs[name] - outputs["dora"]).abs().max() / outputs["dora"].abs().max()
            result["output_difference"] = float(far)
        results[name] = result
    if "dora" in results:
        for result in results.values():
            result["dora_ms_ratio"] = round(results["dora"]["ms"] / result["ms"], 3)
            result["dora_peak_ratio"] = round(results["dora"]["peak_mib"] / result["peak_mib"], 3)
    return results


def summary(tokens: int, results: dict[str, dict]) -> str:
    parts = [f"{tokens} tokens"]
    for name, result in results.items():
        norms = f" (norms {result['norms_ms']})" if "norms_ms" in result else ""
        parts.append(f"{name} {result['ms']} ms{norms}")
    if {"dora", "patched"} <= results.keys():
        parts.append(f"dora / patched {results['patched']['dora_ms_ratio']} (goal {GOAL})")
    return ", ".join(parts)


def surroundings(options: argparse.Namespace) -> dict:
    facts = {**vars(options), "threads": torch.get_num_threads()}
    facts |= {p: importlib.metadata.version(p) for p in ("torch", "peft")}
    if options.device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
    else:
        facts["load"] = round(os.getloadavg()[0], 1)
    facts["date"] = time.strftime("%Y-%m-%d", time.gmtime())
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cuda = torch.cuda.is_available()
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="qwen3-8b" if cuda else "smollm2"
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rank", type=int, default=384 if cuda else 16)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048 if cuda else 512])
    parser.add_argument("--dtype", choices=DTYPES, default="bf16" if cuda else "fp32")
    parser.add_argument("--half-adapters", action="store_true", help="adapters in the base's dtype")
    parser.add_argument("--autocast", action="store_true", help="bf16 autocast around the forward")
    parser.add_argument("--checkpoint", action="store_true", help="checkpoint every layer")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--repeats", type=int, default=20 if cuda else 7)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    options = parser.parse_args()

    cases = {name: Case(name, options) for name in options.only}
    results = {}
    for tokens in options.tokens:
        results[tokens] = measured(cases, tokens, options.repeats)
        print(summary(tokens, results[tokens]), file=sys.stderr)
    print(json.dumps({"surroundings": surroundings(options), "results": results}, indent=1))


if __name__ == "__main__":
    main()
