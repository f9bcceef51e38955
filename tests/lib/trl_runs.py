"""Runs of TRL's trainers over dorad: a tiny or given model, a perturbed adapter, fp32."""

import importlib
import sys
import warnings
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, TrainerCallback, logging

from lib.adapters import LINEARS, perturb
from lib.server import ROOT

PROMPTS = ["What is snow?", "Name a colour.", "Count to three.", "Why?"]
TEMPERATURE = 0.7
KINDS = {"dora": {"use_dora": True}, "lora": {}}


def policy(model: Path, seed: int = 3, delta: float = 0.1, **changes) -> PeftModel:
    """The model in fp32 under one perturbed adapter; `changes` of its LoraConfig."""
    logging.disable_progress_bar()
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    values = {"r": 16, "lora_alpha": 32, "target_modules": LINEARS, "task_type": "CAUSAL_LM"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(base, LoraConfig(**values | changes))
    perturb(adapted, seed, delta)
    return adapted


def arguments(folder: Path, **changes) -> dict:
    """Of a trainer's config: fp32 on the CPU, five steps of eight samples."""
    values = {
        "output_dir": str(folder / "out"),
        "use_vllm": True,
        "use_cpu": True,
        "bf16": False,
        "max_steps": 5,
        "per_device_train_batch_size": 8,
        "max_completion_length": 12,
        "temperature": TEMPERATURE,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    return values | changes


def reward(completions, **_) -> list[float]:
    """Different for almost every completion, so that every step has a gradient."""
    return [float(len(set(text))) + 0.1 * text.count("e") for text in completions]


def dataset() -> Dataset:
    """Enough prompts for one epoch: TRL's order in the next one is another one after a resume."""
    return Dataset.from_dict({"prompt": [f"{text} {i}" for i in range(4) for text in PROMPTS]})


def trainer(trainer_class, config_class, model, folder: Path, processing=None, **changes):
    """A GRPO or RLOO trainer; `model` is a policy."""
    values = arguments(folder, num_generations=4) | changes
    return trainer_class(
        model=model,
        reward_funcs=reward,
        args=config_class(**values),
        train_dataset=dataset(),
        eval_dataset=dataset(),
        processing_class=tokenizer(processing or model.config.name_or_path),
    )


def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def logged(trainer, name: str) -> list[float]:
    """A figure of every step."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def differences(trainer) -> list[float]:
    """Of the log-probabilities of sampled tokens, server against trainer: each step's mean."""
    return logged(trainer, "sampling/sampling_logp_difference/mean")


class Recorder(TrainerCallback):
    """Keeps every answer of the server, and the version that was published for it."""

    def __init__(self, trainer) -> None:
        self.calls = []  # (step, version, requests, samples)
        generation = trainer.vllm_generation
        generate_many = generation.client.generate_many

        def record(requests, **options):
            answers = generate_many(requests, **options)
            self.calls.append((trainer.state.global_step, generation.version, requests, answers))
            return answers

        generation.client.generate_many = record

    def tokens(self) -> list[list[list[int]]]:
        """Of each call, the sampled tokens."""
        return [
            [sample.token_ids.tolist() for samples in answers for sample in samples]
            for _, _, _, answers in self.calls
        ]


def scored(model: PeftModel, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """The trainer's log-probabilities of tokens after a prompt, at TEMPERATURE."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    logprobs = (logits.float() / TEMPERATURE).log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def example(monkeypatch):
    """client/examples/trl_grpo.py, which imports its neighbour."""
    monkeypatch.syspath_prepend(ROOT / "client" / "examples")
    monkeypatch.setitem(sys.modules, "grpo", importlib.import_module("grpo"))
    monkeypatch.setitem(sys.modules, "trl_grpo", importlib.import_module("trl_grpo"))
    return sys.modules["trl_grpo"]
