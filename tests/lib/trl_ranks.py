"""A GRPO training in several processes of one host (gloo): trl_ranks.py TARGET MODEL FOLDER RANKS.

Each process writes what it saw to FOLDER/RANK.json. They are forks, because importing TRL takes
longer than the training.
"""

import json
import os
import sys
from pathlib import Path

import torch
from dorad.trl import served
from trl import GRPOConfig, GRPOTrainer

from lib import trl_runs
from lib.server import free_port


def train(target: str, model: Path, folder: Path) -> dict:
    """This process's part of the training, or all of it."""
    torch.set_num_threads(1)
    # The same global batch, however many processes share it.
    size = 8 // int(os.environ.get("WORLD_SIZE", "1"))
    policy = trl_runs.policy(model, use_dora=True)
    trainer = trl_runs.trainer(
        served(GRPOTrainer, target),
        GRPOConfig,
        policy,
        folder,
        max_steps=3,
        per_device_train_batch_size=size,
    )
    generate, sampled = trainer.vllm_generation.generate, []

    def record(*arguments, **options):
        answer = generate(*arguments, **options)
        sampled.append(answer[1])
        return answer

    trainer.vllm_generation.generate = record
    trainer.train()
    return {
        "sampled": sampled,
        "differences": trl_runs.differences(trainer),
        "version": trainer.vllm_generation.version.ref,
        "connected": trainer.vllm_generation.client is not None,
    }


def main() -> None:
    target, model, folder, ranks = sys.argv[1:]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = ranks
    children = []
    for rank in map(str, range(int(ranks))):
        child = os.fork()
        if child == 0:
            os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
            seen = train(target, Path(model), Path(folder))
            Path(folder, f"{rank}.json").write_text(json.dumps(seen))
            sys.exit()
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    main()
