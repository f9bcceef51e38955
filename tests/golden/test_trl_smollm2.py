"""TRL's GRPOTrainer over a dorad server: SmolLM2-135M and a trained DoRA adapter."""

import warnings

import pytest
import torch
from dorad.train import patch
from dorad.trl import served
from lib import trl_runs
from lib.server import serve
from peft import PeftModel
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

SETTINGS = {"model.device": "cpu", "model.compute_dtype": "fp32"}


@pytest.fixture(scope="module")
def server(smollm2):
    with serve(smollm2.model, settings=SETTINGS) as server:
        yield server


def grpo(server, smollm2, folder, **changes):
    base = AutoModelForCausalLM.from_pretrained(smollm2.model, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        policy = PeftModel.from_pretrained(base, smollm2.adapters["pirate"], is_trainable=True)
    patch(policy)
    trainer_class = served(GRPOTrainer, server.grpc)
    values = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 8}
    values |= {"learning_rate": 2e-4, "gradient_checkpointing": False}
    return trl_runs.trainer(trainer_class, GRPOConfig, policy, folder, **values | changes)


def figure(figures, what, trainer):
    means = trl_runs.differences(trainer)
    times = trl_runs.logged(trainer, "step_time")
    figures.append(
        f"trl SmolLM2 DoRA, {what}: sampling difference, mean of {len(means)} steps "
        f"{sum(means) / len(means):.1e}, largest {max(means):.1e}; "
        f"{sum(times) / len(times):.1f} s a step"
    )
    return means


# What top_p does to the trainer's numbers is shown with a tiny model, too.
@pytest.mark.parametrize("top_p", [1.0, pytest.param(0.9, marks=pytest.mark.deep)])
def test_the_sampled_policy_is_the_trained_one(server, smollm2, tmp_path, figures, top_p):
    trainer = grpo(server, smollm2, tmp_path, top_p=top_p)
    trainer.train()
    means = figure(figures, f"top_p {top_p}", trainer)
    assert len(means) == 5 and 0 < max(means) < 1e-4
    assert max(trl_runs.logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-2
    ratios = trl_runs.logged(trainer, "sampling/importance_sampling_ratio/mean")
    assert all(abs(ratio - 1) < 1e-3 for ratio in ratios)


@pytest.mark.deep
def test_a_skipped_synchronisation_shows(server, smollm2, tmp_path, figures):
    trainer = grpo(server, smollm2, tmp_path)
    publish = trainer.vllm_generation.sync_weights
    trainer.vllm_generation.sync_weights = lambda: trainer.state.global_step != 3 and publish()
    trainer.train()
    means = figure(figures, "fourth sync skipped", trainer)
    assert means[3] > 1e-3 and max(*means[:3], means[4]) < 1e-4


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_the_reward_rises_in_twelve_steps(server, smollm2, tmp_path, figures, monkeypatch):
    example = trl_runs.example(monkeypatch)
    monkeypatch.setattr(example.grpo, "GROUP", 4)
    monkeypatch.setattr(example.grpo, "TASKS", example.grpo.TASKS[:4])
    trainer = example.make_trainer(smollm2.model, 12, server.grpc, tmp_path)
    trainer.train()
    figure(figures, "the example", trainer)
    rewards = trl_runs.logged(trainer, "reward")
    figures.append("trl example, rewards: " + " ".join(f"{reward:.3f}" for reward in rewards))
    assert len(rewards) == 12 and sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1
