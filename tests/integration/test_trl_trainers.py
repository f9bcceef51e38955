"""Every other trainer of TRL that generates with vLLM, and trainings in several processes."""

import json
import subprocess
import sys

import dorad
import pytest
import torch
from datasets import Dataset
from dorad.trl import served
from lib import trl_ranks, trl_runs
from lib.server import ROOT, environment, serve
from transformers import AutoModelForCausalLM
from trl import DistillationConfig, DistillationTrainer
from trl.experimental.gold import GOLDConfig, GOLDTrainer
from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer
from trl.experimental.sdft import SDFTConfig, SDFTTrainer
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

QUESTIONS = [f"Question {i} of many?" for i in range(16)]
PROMPTS = {"prompt": QUESTIONS, "privileged_context": QUESTIONS}
MESSAGES = {
    "messages": [
        [{"role": "user", "content": question}, {"role": "assistant", "content": "Yes."}]
        for question in QUESTIONS
    ]
}


@pytest.fixture(scope="module")
def model(zoo):
    return zoo.model_with_tokenizer("llama2")


@pytest.fixture(scope="module")
def server(model):
    with serve(model, settings={"model.device": "cpu"}) as server:
        yield server


def teacher(model):
    return {"teacher_model": AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)}


@pytest.mark.parametrize(
    ("trainer_class", "config", "options", "data", "further"),
    [
        (DistillationTrainer, DistillationConfig, {}, PROMPTS, teacher),
        (SDPOTrainer, SDPOConfig, {"num_generations": 4}, PROMPTS, None),
        (SDFTTrainer, SDFTConfig, {}, PROMPTS, None),
        (GOLDTrainer, GOLDConfig, {"lmbda": 1.0, "max_length": 96}, MESSAGES, teacher),
        (IWOPDTrainer, IWOPDConfig, {"lmbda": 1.0, "max_length": 96}, MESSAGES, teacher),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_trainer_samples_from_its_policy(
    server, model, tmp_path, trainer_class, config, options, data, further
):
    arguments = further(model) if further else {}
    if trainer_class is SDPOTrainer:
        arguments["reward_funcs"] = trl_runs.reward
    tokenizer = trl_runs.tokenizer(model)
    tokenizer.pad_token = tokenizer.eos_token
    trainer = served(trainer_class, server.grpc)(
        model=trl_runs.policy(model, use_dora=True),
        args=config(**trl_runs.arguments(tmp_path, max_steps=2, **options)),
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer,
        **arguments,
    )
    recorder = trl_runs.Recorder(trainer)
    trainer.train()
    assert [len(tokens) for tokens in recorder.tokens()] == [8, 8]
    versions = [version for _, version, _, _ in recorder.calls]
    assert len({version.digest for version in versions}) == 2, "a step did not change the adapter"
    with dorad.Client(server.grpc) as client:
        last = client.publish("last", model=trainer.model)
    assert trainer.vllm_generation.version.digest == last.digest


def test_processes_share_one_server_and_sample_what_one_would(server, model, tmp_path):
    alone = trl_ranks.train(server.grpc, model, tmp_path)
    run = subprocess.run(
        [sys.executable, trl_ranks.__file__, server.grpc, model, tmp_path, "2"],
        env=environment(PYTHONPATH=f"{ROOT / 'client' / 'src'}:{ROOT / 'tests'}"),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    pair = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [rank["connected"] for rank in pair] == [True, False]
    assert pair[0]["version"] == pair[1]["version"]
    for step in range(3):
        both = pair[0]["sampled"][step] + pair[1]["sampled"][step]
        assert len(both) == 8 and both == alone["sampled"][step]
    assert 0 < max(pair[0]["differences"] + alone["differences"]) < 1e-4
