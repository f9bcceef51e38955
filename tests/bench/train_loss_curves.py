"""Loss curves of PEFT's DoRA, and of the same training after dorad.train.patch, side by side.

    python tests/bench/train_loss_curves.py [--steps 500] [--seeds 0 1 2] [--precisions fp32 bf16]
        [--batch 8] [--rank 16] [--learning-rate 3e-4] [--shape qwen3-8b --layers 4]
        [--jobs 2] [--output FILE]

Trains adapters of the demo's model as `make demo` does (its examples, loss, optimizer, schedule and
clipping; --recipe says which of its adapters), once more for each seed, which decides the adapter's
first values and the order of the examples. Each pair begins with the same bits and sees the same
batches. Each training is a process, --jobs of them at a time, over the GPUs in turn. In fp32 base
and adapter are fp32; bf16 is autocast over a base in bf16, with the adapter in fp32, which is
PEFT's default.

With --shape the base is a random model of that shape in the place of the demo's, made on the
device, with the demo's tokenizer: for large layers and ranks.

Sums in bf16 are rounded, and a curve in bf16 strays from the one in fp32 whatever computes it. So
for each curve in bf16 its distance from PEFT's in fp32 of the same seed is given, too, if that was
asked for: PEFT's own is the measure for the other.

The goal is a mean difference of at most 7e-4 a step, over all steps of a seed. Every 62 examples
the model has seen them all, and losses shrink: differences and losses are given by fifths of the
run as well. One JSON object goes to stdout, or to FILE after every 20 steps of a pair: a run that
ends early leaves its figures.
"""
# ruff: noqa: E402 - the threads are set before torch is imported

import argparse
import concurrent.futures
import contextlib
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import queue
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "client" / "src"), str(ROOT / "demo"), str(ROOT / "tools")]
os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import convert_smollm2
import dorad.train
import make_random_model
import torch
import train_adapters
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

GOAL = 7e-4
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
EVERY = 20  # steps between two reports
FIFTHS = 5
NAMES = ["peft", "patched"]
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# The demo's examples, all of them, and a longer training than the demo's.
EXAMPLES = 1000


class Training:
    """One model with its optimizer, as train_adapters.train has them."""

    def __init__(self, model: Any, recipe: train_adapters.Recipe, autocast: bool) -> None:
        self.model = model.train()
        self.autocast = autocast
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=recipe.learning_rate, weight_decay=0.0
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / 4)
        )
        self.losses: list[float] = []

    def step(self, batch: dict[str, torch.Tensor]) -> None:
        device = self.parameters[0].device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.autocast):
            loss = self.model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())


def random_base(options: argparse.Namespace, folder: Path, dtype: torch.dtype) -> Any:
    shape = make_random_model.Shape.read(options.shape, options.layers)
    config = AutoConfig.for_model(**shape.config)
    config.vocab_size = len(AutoTokenizer.from_pretrained(folder))
    config.use_cache = False
    base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in base.parameters():  # The same values in each dtype; buffers stay fp32.
        parameter.data = parameter.data.to(dtype)
    return base


def adapted(
    options: argparse.Namespace,
    folder: Path,
    recipe: train_adapters.Recipe,
    dtype: torch.dtype,
    device: str,
) -> Any:
    torch.manual_seed(recipe.seed)
    if options.shape:
        with torch.device(device):
            base = random_base(options, folder, dtype)
    else:
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=MODULES,
        use_dora=True,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(base, config).to(device)


def batches(recipe: train_adapters.Recipe, folder: Path, steps: int) -> Iterator[Any]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    data = train_adapters.examples(tokenizer, recipe)
    epochs = -(-steps // -(-len(data) // recipe.batch))
    endless = train_adapters.batches(data, replace(recipe, epochs=epochs), tokenizer.pad_token_id)
    return itertools.islice(endless, steps)


def by_fifths(values: list[float]) -> list[float]:
    """Means over five equal parts; fewer when there are fewer values."""
    bounds = [len(values) * i // FIFTHS for i in range(FIFTHS + 1)]
    parts = [values[begin:end] for begin, end in itertools.pairwise(bounds)]
    return [statistics.fmean(part) for part in parts if part]


def compared(losses: list[float], reference: list[float]) -> dict:
    """How far two curves are apart."""
    apart = [abs(a - b) for a, b in zip(losses, reference, strict=True)]
    return {
        "mean_difference": statistics.fmean(apart),
        "max_difference": max(apart),
        "mean_difference_by_fifths": by_fifths(apart),
    }


def report(
    precision: str, seed: int, curves: dict[str, list[float]], exact: list[float] | None
) -> dict:
    """`exact` is PEFT's curve in fp32, if `curves` are of something else and it is known."""
    peft = curves["peft"]
    apart = compared(curves["patched"], peft)
    result: dict = {
        "precision": precision,
        "seed": seed,
        "steps": len(peft),
        "peft": {"first": peft[0], "final": peft[-1], "loss_by_fifths": by_fifths(peft)},
        "patched": {"final": curves["patched"][-1], **apart},
        "within_goal": apart["mean_difference"] <= GOAL,
    }
    if exact is not None:
        result["from_fp32"] = {
            name: compared(losses, exact[: len(losses)]) for name, losses in curves.items()
        }
    result["curves"] = curves
    return result


def line(result: dict) -> str:
    apart = result["patched"]
    parts = [f"{result['precision']} seed {result['seed']} step {result['steps']}"]
    parts.append(f"loss {result['peft']['final']:.4f} and {apart['final']:.4f}")
    parts.append(
        f"difference mean {apart['mean_difference']:.2e} max {apart['max_difference']:.2e}"
    )
    for name, far in result.get("from_fp32", {}).items():
        parts.append(f"{name} from fp32 {far['mean_difference']:.2e}")
    return ", ".join(parts)


class Job(NamedTuple):
    """A training."""

    seed: int
    precision: str
    name: str


def train(options: argparse.Namespace, job: Job, device: str, told: Any) -> None:
    """In a process of its own. Tells its job and its losses after every EVERY steps."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if device != "cpu":
        torch.cuda.set_device(device)
    recipe = replace(
        train_adapters.RECIPES[options.recipe],
        start="",
        seed=job.seed,
        batch=options.batch,
        rank=options.rank,
        alpha=2 * options.rank,
        examples=EXAMPLES,
        learning_rate=options.learning_rate,
    )
    folder = convert_smollm2.ensure()
    model = adapted(options, folder, recipe, PRECISIONS[job.precision], device)
    if job.name == "patched":
        dorad.train.patch(model)
    run = Training(model, recipe, job.precision == "bf16")
    for number, made in enumerate(batches(recipe, folder, options.steps), 1):
        run.step({key: tensor.to(device) for key, tensor in made.items()})
        if number % EVERY == 0 or number == options.steps:
            told.put((job, list(run.losses)))


class Report:
    """What is known of all pairs."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.output: Path | None = options.output
        facts = {k: v for k, v in vars(options).items() if k != "output"}
        facts |= {"threads": torch.get_num_threads(), "load": round(os.getloadavg()[0], 1)}
        facts |= {p: importlib.metadata.version(p) for p in ("torch", "peft", "transformers")}
        if options.device == "cuda":
            facts["gpu"] = torch.cuda.get_device_name()
        facts["date"] = time.strftime("%Y-%m-%d", time.gmtime())
        self.whole: dict = {"surroundings": facts, "goal": GOAL, "results": []}
        self.losses: dict[Job, list[float]] = {}
        self.began = time.monotonic()

    def note(self, job: Job, losses: list[float]) -> None:
        """Of a training that may go on."""
        self.losses[job] = losses
        pair = [self.losses.get(job._replace(name=name), []) for name in NAMES]
        if min(map(len, pair)) == len(losses):
            print(f"{time.monotonic() - self.began:6.0f} s  {line(self._of(job))}", file=sys.stderr)
            pairs = {each for each in self.losses if each._replace(name="peft") in self.losses}
            self.whole["results"] = [
                self._of(each) for each in sorted(pairs) if each.name != "peft"
            ]
            if self.output is not None:
                self.output.write_text(json.dumps(self.whole) + "\n")

    def _of(self, job: Job) -> dict:
        """The pair's report, of the steps that are known of it, and of PEFT's in fp32."""
        curves = {name: self.losses.get(job._replace(name=name), []) for name in NAMES}
        exact = None
        if job.precision != "fp32":
            exact = self.losses.get(Job(job.seed, "fp32", "peft"))
        known = min(map(len, [*curves.values(), *([exact] if exact else [])]))
        cut = {name: losses[:known] for name, losses in curves.items()}
        return report(job.precision, job.seed, cut, exact)

    def close(self) -> None:
        if self.output is None:
            print(json.dumps(self.whole))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    gpus = torch.cuda.device_count()
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--recipe", choices=train_adapters.RECIPES, default="pirate-v1")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if gpus else "cpu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--shape", choices=make_random_model.SHAPES, help="of a random base")
    parser.add_argument("--layers", type=int, default=0, help="0: as many as the shape has")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    parser.add_argument("--output", type=Path, help="where to write; default: stdout")
    options = parser.parse_args()

    whole = Report(options)
    precisions = sorted(options.precisions, key=list(PRECISIONS).index)
    jobs = [Job(*each) for each in itertools.product(options.seeds, precisions, NAMES)]
    context = multiprocessing.get_context("spawn")
    with (
        context.Manager() as manager,
        concurrent.futures.ProcessPoolExecutor(
            options.jobs, context, max_tasks_per_child=1
        ) as pool,
    ):
        told = manager.Queue()
        running = {
            pool.submit(
                train,
                options,
                job,
                f"cuda:{number % gpus}" if options.device == "cuda" else "cpu",
                told,
            )
            for number, job in enumerate(jobs)
        }
        while running or not told.empty():
            with contextlib.suppress(queue.Empty):
                whole.note(*told.get(timeout=1))
            for done in [each for each in running if each.done()]:
                running.remove(done)
                done.result()  # or its error
    whole.close()


if __name__ == "__main__":
    main()
