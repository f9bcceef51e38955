"""client/examples/verl_grpo.py on the CPU: verl's own training and workers.

Arguments: model folder, adapters' root, a folder to write to. The model's external_lib leaves out
the update before the last step. Prints the metrics of each step.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas

HERE = Path(__file__).resolve().parent
FOLDER, ROOT, OUT = sys.argv[1], sys.argv[2], Path(sys.argv[3])
EXAMPLE = HERE.parents[1] / "client" / "examples" / "verl_grpo.py"
METRICS = OUT / "metrics.jsonl"
os.environ |= {
    "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{HERE}",  # of the workers
    "VERL_ENGINE_DEVICE": "cuda",  # The engine's name; its device is the platform's.
    "VERL_FILE_LOGGER_PATH": str(METRICS),
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu",
}

SEEN = OUT / "prompts.parquet"
STEPS = 4
OPTIONS = [
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "actor_rollout_ref.model.external_lib=verl_less_sync",
    "actor_rollout_ref.model.use_remove_padding=False",
    "+actor_rollout_ref.model.override_config.attn_implementation=eager",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "actor_rollout_ref.rollout.dtype=float32",
    "+actor_rollout_ref.rollout.engine_kwargs.dorad.engine.kv_bytes=64MiB",
    "+actor_rollout_ref.rollout.engine_kwargs.dorad.engine.threads=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.temperature=0.7",
    "actor_rollout_ref.rollout.top_p=0.9",
    "data.dataloader_num_workers=0",
    "data.max_prompt_length=32",
    "data.max_response_length=24",
    "data.train_batch_size=4",
    f"reward.custom_reward_function.path={HERE / 'verl_reward.py'}",
    "reward.num_workers=1",
    "trainer.device=cpu",
    "trainer.logger=[file]",
    "trainer.n_gpus_per_node=2",
    "trainer.save_freq=-1",
    "trainer.test_freq=-1",
    f"trainer.total_training_steps={STEPS}",
    "trainer.val_before_train=False",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "ray_kwargs.ray_init.num_cpus=32",
    "+ray_kwargs.ray_init.include_dashboard=False",
    "+ray_kwargs.ray_init.object_store_memory=268435456",
    "+ray_kwargs.ray_init.resources={NPU:2}",
]


def prompt(number):
    return {
        "data_source": "ports",
        "prompt": [{"role": "user", "content": f"port {number}?"}],
        "reward_model": {"style": "rule", "ground_truth": ""},
        "extra_info": {"index": number},
    }


if __name__ == "__main__":
    pandas.DataFrame([prompt(number) for number in range(16)]).to_parquet(SEEN)
    files = ["--model", FOLDER, "--adapter", f"{ROOT}/dora-0", "--train", SEEN, "--val", SEEN]
    subprocess.run(
        [sys.executable, EXAMPLE, *files, *OPTIONS],
        check=True,
        cwd=OUT,  # Hydra writes there.
        stdout=sys.stderr,
    )
    print(json.dumps([json.loads(line)["data"] for line in METRICS.read_text().splitlines()]))
