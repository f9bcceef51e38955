"""A whole training step of a whole model: PEFT's DoRA, and the same with dorad.train, in one run.

    python tests/bench/train_step.py [--shape qwen3-8b] [--rank 384] [--batch 1] [--tokens 2048]
        [--adapters fp32 bf16] [--only peft patched eager] [--micro-batches 1] [--loss-tokens 0]

  peft     PEFT's DoRA on all seven linears of each layer
  patched  after dorad.train.patch, as a trainer gets it
  eager    the same, composed in plain torch operations

A step is forward and backward of each micro-batch, which are the gradients, and AdamW of
transformers' model with the loss over the whole vocabulary, gradient checkpointing on, in bf16 with
random weights made on the device: nothing is downloaded. With adapters in fp32 (PEFT's default)
forwards run under autocast; with bf16 everything is bf16. There is one model and one optimizer:
what changes between the configurations is `patch` and `unpatch`, so they take turns with the same
weights (A B C A B C ...). Medians are reported, of steps, of gradients and of forwards without
gradients, with the cosine of the last tokens' logits to the first configuration's. Memory is what a
step takes at its peak beyond weights, adapters and the optimizer's state, which `resident` is.

One H200 (141 GB) holds it many times: for Qwen3-8B at r = 384 the weights take 16.4 GB, adapters,
gradients and AdamW's two moments 16.8 GB in fp32, and logits and loss of 2,048 tokens 4 GB.

A Markdown table goes to stderr, one JSON object to stdout. Without a GPU the shape is tiny: that
tries the program, no more.
"""
# ruff: noqa: E402 - the threads are set before torch is imported

import argparse
import contextlib
import gc
import importlib.metadata
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "client" / "src"), str(ROOT / "tests"), str(ROOT / "tools")]
os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import dorad.train
import make_random_model
import torch
from lib.peak import peak_bytes
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NAMES = ["peft", "patched", "eager"]
LAST_TOKENS = 64  # whose logits are compared
GOAL = 2.0  # PEFT's time to the patched model's


class Trained:
    """A model with an adapter and an optimizer, which can be put into each configuration."""

    def __init__(self, options: argparse.Namespace, half_adapters: bool) -> None:
        self.device = options.device
        self.half_adapters = half_adapters
        shape = make_random_model.Shape.read(options.shape, options.layers)
        config = AutoConfig.for_model(**shape.config)
        config.use_cache = False
        torch.manual_seed(0)
        with torch.device(self.device):  # PEFT's factors, too
            base = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation="sdpa"
            )
            lora = LoraConfig(
                r=options.rank,
                lora_alpha=2 * options.rank,
                target_modules=LINEARS,
                use_dora=True,
                task_type="CAUSAL_LM",
            )
            self.model = get_peft_model(base, lora, autocast_adapter_dtype=not half_adapters)
        self.model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
        self.model.train()
        self._perturb(options.rank)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-6, fused=self.device == "cuda")
        ids = torch.randint(0, config.vocab_size, (options.batch, options.tokens))
        self.ids = ids.to(self.device)
        self.micro_batches, self.loss_tokens = options.micro_batches, options.loss_tokens

    def _perturb(self, rank: int) -> None:
        """An adapter that does something, or that losses agree would mean nothing."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.02 * rank**-0.5)
                elif "magnitude" in name:
                    parameter.mul_(0.9 + 0.2 * torch.rand_like(parameter))

    @contextlib.contextmanager
    def configured(self, name: str) -> Iterator[None]:
        if name != "peft":
            dorad.train.patch(self.model)
        try:
            with dorad.train.tier("eager" if name == "eager" else "auto"):
                yield
        finally:
            dorad.train.unpatch(self.model)

    def logits(self, keep: int) -> torch.Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=not self.half_adapters):
            output = self.model(input_ids=self.ids, logits_to_keep=keep)
        logits: torch.Tensor = output.logits
        return logits

    def loss(self) -> torch.Tensor:
        if not self.loss_tokens:
            with torch.autocast(self.device, torch.bfloat16, enabled=not self.half_adapters):
                whole: torch.Tensor = self.model(input_ids=self.ids, labels=self.ids).loss
            return whole
        logits = self.logits(self.loss_tokens + 1)[:, :-1].flatten(0, 1)
        targets = self.ids[:, -self.loss_tokens :].flatten()
        return torch.nn.functional.cross_entropy(logits.float(), targets)

    def gradients(self) -> None:
        for _ in range(self.micro_batches):
            (self.loss() / self.micro_batches).backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.gradients()
        self.update()

    @torch.no_grad()
    def infer(self) -> torch.Tensor:
        return self.loss()

    def seconds(self, work: Callable[[], object]) -> float:
        self.synchronize()
        began = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - began

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def resident_bytes(self) -> int:
        kept = list(self.model.parameters()) + list(self.model.buffers())
        for state in self.optimizer.state.values():
            kept += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)


def measured(trained: Trained, names: list[str], repeats: int) -> dict:
    """What each configuration does; the first is the measure."""
    kinds = ("step", "gradients", "forward")
    times: dict[str, dict[str, list[float]]] = {n: {kind: [] for kind in kinds} for n in names}
    losses, peaks, logits = {}, {}, {}
    for name in names:  # before any step: of the same weights
        with trained.configured(name), torch.no_grad():
            losses[name] = trained.infer().item()
            logits[name] = trained.logits(LAST_TOKENS).double().flatten()
    for name in names:
        with trained.configured(name):
            trained.step()  # warm-up; the first one also makes the optimizer's state
            peaks[name] = {
                "step": peak_bytes(trained.step, trained.device),
                "forward": peak_bytes(trained.infer, trained.device),
            }
            peaks[name]["gradients"] = peaks[name]["step"]
    for _ in range(repeats):
        for name in names:
            with trained.configured(name):
                trained.step()  # as in the middle of a training
                times[name]["forward"].append(trained.seconds(trained.infer))
                gradients = trained.seconds(trained.gradients)
                times[name]["gradients"].append(gradients)
                times[name]["step"].append(gradients + trained.seconds(trained.update))
    first = names[0]
    results: dict = {"resident_mb": round(trained.resident_bytes() / 1e6, 2)}
    for name in names:
        cosine = torch.nn.functional.cosine_similarity(logits[name], logits[first], dim=0)
        result: dict = {
            "loss": losses[name],
            "loss_difference": losses[name] - losses[first],
            "logits_cosine": round(float(cosine), 7),
        }
        for what, seconds in times[name].items():
            whole = statistics.median(times[first][what])
            result[what] = {
                "ms": round(1e3 * statistics.median(seconds), 3),
                "ms_min": round(1e3 * min(seconds), 3),
                "ms_max": round(1e3 * max(seconds), 3),
                "ratio": round(whole / statistics.median(seconds), 3),
                "peak_mb": round(peaks[name][what] / 1e6, 2),
                "peak_ratio": round(peaks[first][what] / peaks[name][what], 3),
            }
        results[name] = result
    return results


def rows(adapters: str, names: list[str], results: dict) -> Iterator[str]:
    for name in names:
        step, gradients, forward = (results[name][k] for k in ("step", "gradients", "forward"))
        yield (
            f"| {adapters}, {name} | {step['ms']:.1f} ms | {step['ratio']:.2f} |"
            f" {step['peak_mb']:.1f} MB | {step['peak_ratio']:.2f} |"
            f" {gradients['ms']:.1f} ms | {gradients['ratio']:.2f} |"
            f" {forward['ms']:.1f} ms | {forward['ratio']:.2f} | {forward['peak_mb']:.1f} MB |"
            f" {results[name]['logits_cosine']:.6f} |"
        )


def surroundings(options: argparse.Namespace) -> dict:
    facts = {**vars(options), "goal": GOAL, "threads": torch.get_num_threads()}
    facts |= {p: importlib.metadata.version(p) for p in ("torch", "peft", "transformers")}
    if options.device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
    else:
        facts["load"] = round(os.getloadavg()[0], 1)
    facts["date"] = time.strftime("%Y-%m-%d", time.gmtime())
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cuda = torch.cuda.is_available()
    parser.add_argument(
        "--shape", choices=make_random_model.SHAPES, default="qwen3-8b" if cuda else "tiny"
    )
    parser.add_argument("--layers", type=int, default=0, help="0: as many as the shape has")
    parser.add_argument("--rank", type=int, default=384 if cuda else 16)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=2048 if cuda else 64, help="of a sequence")
    parser.add_argument("--adapters", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--repeats", type=int, default=10 if cuda else 3)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--micro-batches", type=int, default=1, help="of a step")
    parser.add_argument("--loss-tokens", type=int, default=0, help="the last ones; 0: all")
    options = parser.parse_args()

    print(
        "| adapters | step | × | peak | × | gradients | × | forward | × | peak | logits' cosine |",
        file=sys.stderr,
    )
    print("|" + "---|" * 11, file=sys.stderr)
    results = {}
    for adapters in options.adapters:
        trained = Trained(options, half_adapters=adapters == "bf16")
        results[adapters] = measured(trained, options.only, options.repeats)
        del trained
        gc.collect()  # before the next one is made
        for row in rows(adapters, options.only, results[adapters]):
            print(row, file=sys.stderr)
    print(json.dumps({"surroundings": surroundings(options), "results": results}, indent=1))


if __name__ == "__main__":
    main()
