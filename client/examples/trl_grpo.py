"""TRL's GRPOTrainer trains a DoRA policy; dorad draws its samples in the place of vLLM.

    python client/examples/trl_grpo.py [--model DIR] [--steps 12] [--target HOST:PORT]

Without --target the trainer runs a server of its own: DORAD_BINARY, build/dorad, or `dorad` on
PATH. The tasks and the reward are those of grpo.py beside this file, which writes the loop out.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

# Before torch: trainer and server take turns on the same cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import grpo
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

import dorad.train
import dorad.trl


def rewards(
    completions: list[list[dict[str, str]]],
    completion_ids: list[list[int]],
    keywords: list[list[str]],
    **_: Any,
) -> list[float]:
    """About five words, ended by the model itself, with punctuation, to the point."""
    return [
        grpo.reward(message["content"], len(ids) < grpo.MAX_TOKENS, tuple(words))
        for (message,), ids, words in zip(completions, completion_ids, keywords, strict=True)
    ]


def make_trainer(model: Path, steps: int, target: str | None, folder: Path, **changes: Any) -> Any:
    """`changes` of the GRPOConfig."""
    on_gpu = torch.cuda.is_available()
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "use_vllm": True,
        "max_steps": steps,
        "per_device_train_batch_size": grpo.GROUP * len(grpo.TASKS),
        "num_generations": grpo.GROUP,
        "max_completion_length": grpo.MAX_TOKENS,
        "temperature": grpo.TEMPERATURE,
        "learning_rate": grpo.LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "adam_beta1": grpo.BETAS[0],
        "adam_beta2": grpo.BETAS[1],
        # Of bf16 the trainer's rounding would be most of what the log calls a difference.
        "bf16": False,
        "use_cpu": not on_gpu,
        "model_init_kwargs": {"dtype": "float32"},
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    # The one line that changes.
    trainer_class = dorad.trl.served(GRPOTrainer, target)
    trainer = trainer_class(
        model=str(model),
        reward_funcs=rewards,
        args=GRPOConfig(**options | changes),
        train_dataset=Dataset.from_dict(
            {
                "prompt": [[{"role": "user", "content": question}] for question, _ in grpo.TASKS],
                "keywords": [list(words) for _, words in grpo.TASKS],
            }
        ),
        peft_config=LoraConfig(
            r=16, lora_alpha=32, target_modules=grpo.LINEARS, use_dora=True, task_type="CAUSAL_LM"
        ),
    )
    dorad.train.patch(
        trainer.model
    )  # PEFT would build B·A, as large as the base, in every forward.
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=grpo.MODEL, help="the base, for both sides")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--target", help="a running server of the same model, computing in fp32")
    parser.add_argument("--output", type=Path, default=Path("out"), help="the trainer's folder")
    options = parser.parse_args()
    built = grpo.ROOT / "build" / "dorad"
    if built.is_file():
        os.environ.setdefault("DORAD_BINARY", str(built))
    trainer = make_trainer(options.model, options.steps, options.target, options.output)
    trainer.train()
    print("\nstep  reward  sampling difference  time")
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    for number, entry in enumerate(steps, 1):
        difference = entry["sampling/sampling_logp_difference/mean"]
        print(
            f"{number:>4}  {entry['reward']:>6.3f}  {difference:>19.1e}"
            f"  {entry['step_time']:>3.1f} s"
        )


if __name__ == "__main__":
    main()
