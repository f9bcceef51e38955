"""A run's configuration, made by verl from its own defaults, as its command line does."""

from pathlib import Path

import verl
from hydra import compose, initialize_config_dir

OPTIONS = [
    "actor_rollout_ref.model.external_lib=dorad.verl",
    "actor_rollout_ref.model.lora_rank=4",
    "+actor_rollout_ref.model.override_config.attn_implementation=eager",
    "actor_rollout_ref.rollout.name=dorad",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.prompt_length=32",
    "actor_rollout_ref.rollout.response_length=900",
    "+actor_rollout_ref.rollout.engine_kwargs.dorad.engine.kv_bytes=64MiB",
    "+actor_rollout_ref.rollout.engine_kwargs.dorad.engine.threads=1",
]


def configuration(model, *changes):
    folder = str(Path(verl.__file__).parent / "trainer" / "config")
    options = [f"actor_rollout_ref.model.path={model}", *OPTIONS, *changes]
    with initialize_config_dir(folder, version_base=None):
        return compose("ppo_trainer", options)
