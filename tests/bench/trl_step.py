"""A step of TRL's GRPOTrainer with samples of dorad, beside TRL with another generator, in one run.

    python tests/bench/trl_step.py [--beside transformers|vllm] [--model DIR] [--rank 16] [--lora]
        [--patch] [--prompts 4] [--samples 4] [--tokens 24] [--rounds 2] [--steps 2] [--dtype fp32]

  trl     the trainer generates with transformers, or with vLLM in its own process (colocate)
  dorad   the same trainer out of dorad.trl.served, which starts a server of its own on the device

Both train the same model, DoRA on all seven linears of each layer, on the same prompts, in turns
(trl dorad trl dorad ...): a round is a training of so many steps in a process of its own, of which
the first is left out. Medians of whole steps, and of their parts: generation, and the
synchronization of the weights: dorad publishes the adapter, TRL loads the merged model into vLLM.
With --patch both use dorad.train.patch: without it PEFT's own norms are most of a step.

A Markdown table goes to stderr, one JSON object to stdout. The server is DORAD_BINARY, or `dorad`
on PATH.
"""
# ruff: noqa: E402 - the threads are set before torch is imported

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "client" / "src"), str(ROOT / "tests")]
os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from dorad.train import patch
from dorad.trl import served
from lib.adapters import LINEARS
from lib.smollm2 import CACHE
from lib.trl_runs import reward
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

NAMES = ["trl", "dorad"]


def timed(owner: object, name: str, times: list[float]) -> None:
    """Notes the seconds of each call of a method."""
    method = getattr(owner, name)

    def run(*arguments, **options):
        began = time.monotonic()
        try:
            return method(*arguments, **options)
        finally:
            times.append(time.monotonic() - began)

    setattr(owner, name, run)


def train(name: str, options: argparse.Namespace, folder: str) -> dict[str, list[float]]:
    """One round: seconds of each step and of its parts."""
    trainer_class = served(GRPOTrainer) if name == "dorad" else GRPOTrainer
    with_server = name == "dorad" or options.beside == "vllm"
    on_gpu = torch.cuda.is_available()
    trainer = trainer_class(
        model=str(options.model),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=folder,
            use_vllm=with_server,
            vllm_mode="server" if name == "dorad" else "colocate",
            vllm_gpu_memory_utilization=options.vllm_memory,
            vllm_max_model_length=1024,
            max_steps=options.steps + 1,
            per_device_train_batch_size=options.prompts * options.samples,
            num_generations=options.samples,
            max_completion_length=options.tokens,
            temperature=0.7,
            learning_rate=1e-5,
            bf16=options.dtype == "bf16",
            use_cpu=not on_gpu,
            model_init_kwargs={"dtype": "float32" if options.dtype == "fp32" else "bfloat16"},
            gradient_checkpointing=on_gpu,
            # Both generators make every token of a sample.
            generation_kwargs=(
                {"ignore_eos": True}
                if with_server
                else {"min_new_tokens": options.tokens, "max_new_tokens": options.tokens}
            ),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict(
            {"prompt": [f"Write {i} words about the sea and the sky." for i in range(64)]}
        ),
        peft_config=LoraConfig(
            r=options.rank,
            lora_alpha=2 * options.rank,
            target_modules=LINEARS,
            use_dora=not options.lora,
            task_type="CAUSAL_LM",
        ),
    )
    if options.patch and not options.lora:
        patch(trainer.model)
    times: dict[str, list[float]] = defaultdict(list)
    timed(trainer, "training_step", times["step"])
    timed(trainer, "_generate_single_turn", times["generate"])
    if with_server:
        timed(trainer.vllm_generation, "sync_weights", times["sync"])
    trainer.train()
    if with_server:
        # It runs inside of TRL's generation; at the end of training perhaps once more.
        pairs = zip(times["generate"], times["sync"], strict=False)
        times["generate"] = [whole - sync for whole, sync in pairs]
    if name == "dorad":
        trainer.vllm_generation.close()
    return {part: values[1 : options.steps + 1] for part, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--beside", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--vllm-memory", type=float, default=0.4, help="its share of the GPU's")
    parser.add_argument("--model", type=Path, default=CACHE / "models" / "SmolLM2-135M-Instruct")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--patch", action="store_true")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    options = parser.parse_args()
    seconds: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in NAMES}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for name in NAMES:
                # In a process of its own: the memory of a GPU is free again behind it.
                with concurrent.futures.ProcessPoolExecutor(
                    1, mp_context=multiprocessing.get_context("spawn")
                ) as process:
                    parts = process.submit(train, name, options, folder).result()
                print(name, parts, file=sys.stderr)
                for part, values in parts.items():
                    seconds[name][part] += values
    medians = {
        name: {part: statistics.median(values) for part, values in parts.items()}
        for name, parts in seconds.items()
    }
    trl, ours = medians["trl"], medians["dorad"]
    ratios = {part: trl[part] / ours[part] for part in trl}
    print("| seconds | trl | dorad | trl / dorad |\n|---|---|---|---|", file=sys.stderr)
    for part, value in ours.items():
        theirs = f"{trl[part]:.2f} | {value:.2f} | {ratios[part]:.2f}" if part in trl else ""
        print(f"| {part} | {theirs or f'| {value:.2f} |'} |", file=sys.stderr)
    shape = {key: str(value) for key, value in vars(options).items()}
    print(json.dumps({"options": shape, "medians": medians, "ratios": ratios}))


if __name__ == "__main__":
    main()
