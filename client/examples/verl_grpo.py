"""verl's GRPO trains a DoRA policy; dorad draws its samples in the place of vLLM.

    python client/examples/verl_grpo.py --model DIR --train FILE.parquet --val FILE.parquet \\
        [--adapter DIR] [verl's OVERRIDES ...]

The files are verl's, as its examples/data_preprocess/gsm8k.py makes them. The policy begins with
the adapter in a folder, which is made if it does not exist. Each trainer's server is DORAD_BINARY,
or `dorad` on PATH.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

OPTIONS = [
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=256",
    "data.max_prompt_length=512",
    "data.max_response_length=256",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.optim.lr=3e-6",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
    "trainer.n_gpus_per_node=1",
    # The lines that change.
    "actor_rollout_ref.model.external_lib=dorad.verl",
    "actor_rollout_ref.rollout.name=dorad",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
]


def make_adapter(model: str, folder: Path, rank: int) -> None:
    """A new DoRA adapter: verl makes LoRA ones, and loads any."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear",
        use_dora=True,
        task_type="CAUSAL_LM",
    )
    base = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    get_peft_model(base, config).save_pretrained(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="the base: a folder, or a name on the hub")
    parser.add_argument("--train", required=True, help="prompts to train on")
    parser.add_argument("--val", required=True, help="prompts to validate with")
    parser.add_argument("--adapter", type=Path, default=Path("out/adapter"), help="its folder")
    parser.add_argument("--rank", type=int, default=32, help="of a new adapter")
    options, overrides = parser.parse_known_args(arguments)
    if not options.adapter.exists():
        make_adapter(options.model, options.adapter, options.rank)
    command = [
        *(sys.executable, "-m", "verl.trainer.main_ppo", *OPTIONS),
        f"data.train_files={options.train}",
        f"data.val_files={options.val}",
        f"actor_rollout_ref.model.path={options.model}",
        f"actor_rollout_ref.model.lora_adapter_path={options.adapter.resolve()}",
        # verl asks whether there is an adapter; the folder's rank counts.
        f"actor_rollout_ref.model.lora_rank={options.rank}",
        *overrides,
    ]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
