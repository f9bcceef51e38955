"""A training of TRL and one of transformers, with and without the one line of dorad.train.

    python tests/bench/train_trainers.py [--model DIR] [--ranks 16 128] [--steps 6] [--tokens 128]
        [--batch 4]

  trl           TRL's SFTTrainer makes the PEFT model; the line is callbacks=[PatchCallback()]
  transformers  the Trainer gets the model of get_peft_model, of dorad.train or of PEFT

DoRA on all seven linears of each layer, fp32, AdamW, random tokens. Both trainings of a pair begin
with the same bits and see the same batches, and they take turns (PEFT, patched, PEFT, patched ...).
Given are the median seconds of a step, without the first one of each training, their ratio, and the
largest difference of the losses.

A Markdown table goes to stderr, one JSON object to stdout.
"""
# ruff: noqa: E402 - the threads are set before torch is imported

import argparse
import importlib.metadata
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "client" / "src")]
os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import datasets
import dorad.train
import peft
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Clock(TrainerCallback):
    """The seconds of each step, and its loss."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._began)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])


def arguments(options: argparse.Namespace) -> dict[str, Any]:
    return dict(
        output_dir=tempfile.gettempdir(),
        use_cpu=options.device == "cpu",
        bf16=False,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def config(rank: int) -> peft.LoraConfig:
    torch.manual_seed(0)  # of A's initial values
    return peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=LINEARS, use_dora=True, task_type="CAUSAL_LM"
    )


def base(options: argparse.Namespace) -> Any:
    return AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)


def rows(options: argparse.Namespace) -> list[list[int]]:
    made = torch.Generator().manual_seed(4)
    shape = (options.steps * options.batch, options.tokens)
    return torch.randint(3, 40_000, shape, generator=made).tolist()


def trl(options: argparse.Namespace, rank: int, clock: Clock, patched: bool) -> Any:
    return SFTTrainer(
        model=base(options),
        args=SFTConfig(**arguments(options), max_length=None, gradient_checkpointing=False),
        train_dataset=datasets.Dataset.from_dict({"input_ids": rows(options)}),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        peft_config=config(rank),
        callbacks=[clock, *([dorad.train.PatchCallback()] if patched else [])],
    )


def plain(options: argparse.Namespace, rank: int, clock: Clock, patched: bool) -> Any:
    make = dorad.train.get_peft_model if patched else peft.get_peft_model
    data = rows(options)
    return Trainer(
        model=make(base(options), config(rank)),
        args=TrainingArguments(**arguments(options)),
        train_dataset=datasets.Dataset.from_dict({"input_ids": data, "labels": data}),
        callbacks=[clock],
    )


TRAINERS: dict[str, Callable[[argparse.Namespace, int, Clock, bool], Any]] = {
    "trl": trl,
    "transformers": plain,
}


def measured(options: argparse.Namespace, name: str, rank: int) -> dict[str, Any]:
    seconds: dict[bool, list[float]] = {False: [], True: []}
    losses: dict[bool, list[float]] = {}
    for _ in range(options.turns):
        for patched in (False, True):
            clock = Clock()
            trainer = TRAINERS[name](options, rank, clock, patched)
            trainer.train()
            seconds[patched] += clock.seconds[1:]
            losses[patched] = clock.losses
    peft_s, ours_s = statistics.median(seconds[False]), statistics.median(seconds[True])
    apart = [abs(a - b) for a, b in zip(losses[False], losses[True], strict=True)]
    return {
        "trainer": name,
        "rank": rank,
        "peft_s": round(peft_s, 3),
        "patched_s": round(ours_s, 3),
        "ratio": round(peft_s / ours_s, 3),
        "losses": losses[False],
        "largest_difference": max(apart),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cuda = torch.cuda.is_available()
    parser.add_argument(
        "--model", type=Path, default=ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128, help="of a sequence")
    parser.add_argument("--steps", type=int, default=6, help="of a call")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    options = parser.parse_args()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()

    print("| trainer, rank | PEFT | one line added | × | losses apart |", file=sys.stderr)
    print("|" + "---|" * 5, file=sys.stderr)
    results = []
    for name in TRAINERS:
        for rank in options.ranks:
            result = measured(options, name, rank)
            results.append(result)
            print(
                f"| {name}, {rank} | {result['peft_s']:.2f} s | {result['patched_s']:.2f} s |"
                f" {result['ratio']:.2f} | {result['largest_difference']:.1e} |",
                file=sys.stderr,
                flush=True,
            )
    facts = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    facts |= {p: importlib.metadata.version(p) for p in ("torch", "peft", "transformers", "trl")}
    facts |= {"threads": torch.get_num_threads(), "load": round(os.getloadavg()[0], 1)}
    facts["date"] = time.strftime("%Y-%m-%d", time.gmtime())
    print(json.dumps({"surroundings": facts, "results": results}, indent=1))


if __name__ == "__main__":
    main()
