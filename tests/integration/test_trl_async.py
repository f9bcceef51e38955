"""TRL's AsyncGRPOTrainer publishes its adapter, also a DoRA one, at each synchronisation.

Its training step needs a GPU.
"""

import json
import queue
import subprocess
import sys

import dorad
import pytest
import torch
from dorad.trl import UnsupportedError, served
from lib import trl_runs
from lib.gateway import running_gateway
from lib.server import ROOT, environment, serve
from peft import LoraConfig
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer


class Worker:
    """A rollout worker; it notes the versions that it gets."""

    def __init__(self) -> None:
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        self.versions = []

    def update_model_version(self, version: int) -> None:
        self.versions.append(version)


@pytest.fixture(scope="module")
def model(zoo):
    return zoo.model_with_tokenizer("llama2")


@pytest.fixture(scope="module")
def server(model):
    with serve(model, settings={"model.device": "cpu"}) as server:
        yield server


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch):
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)


def asynchronous(target, model, folder, worker=None, **changes):
    config = {"r": 8, "target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM"}
    return served(AsyncGRPOTrainer, target)(
        model=str(model),
        reward_funcs=trl_runs.reward,
        args=AsyncGRPOConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            report_to=[],
            max_steps=2,
            per_device_train_batch_size=4,
            max_staleness=1,
        ),
        train_dataset=trl_runs.dataset(),
        processing_class=trl_runs.tokenizer(model),
        peft_config=LoraConfig(**config | changes),
        rollout_worker=worker,
    )


@pytest.mark.parametrize("kind", trl_runs.KINDS)
def test_each_synchronisation_publishes_the_adapter_alone(server, model, tmp_path, kind):
    worker = Worker()
    trainer = asynchronous(server.grpc, model, tmp_path, worker, **trl_runs.KINDS[kind])
    with dorad.Client(server.grpc) as client:
        digests = []
        for _ in range(3):
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    if parameter.requires_grad:
                        parameter.add_(0.01 * torch.randn_like(parameter))
            trainer._sync_weight()
            digests.append(client.publish("same", model=trainer.model).digest)
        name = trainer._lora_name
        found = {v.name: v for v in client.adapters() if v.name.startswith(name)}
    assert worker.versions == [1, 2, 3] and len(set(digests)) == 3
    assert [found[f"{name}-v{number}"].digest for number in (1, 2, 3)] == digests
    # Older than max_staleness: no request may name it any more.
    assert [found[f"{name}-v{number}"].state for number in (1, 2, 3)] == ["gone", "ready", "ready"]
    assert {v.kind for v in found.values()} == {kind}


def test_runs_on_one_server_have_names_of_their_own(server, model, tmp_path):
    names = set()
    for number in range(2):
        trainer = asynchronous(server.grpc, model, tmp_path / str(number), Worker())
        trainer._sync_weight()
        names.add(trainer._lora_name)
    with dorad.Client(server.grpc) as client:
        published = {v.name for v in client.adapters()}
    assert len(names) == 2 and {f"{name}-v1" for name in names} <= published


def test_refuses_what_cannot_be_published(server, model, tmp_path):
    with pytest.raises(UnsupportedError, match="trained parameters are not LoRA's or DoRA's"):
        asynchronous(server.grpc, model, tmp_path, Worker(), modules_to_save=["embed_tokens"])
    with pytest.raises(UnsupportedError, match="give the trainer a peft_config"):
        served(AsyncGRPOTrainer, server.grpc)(model=str(model), train_dataset=trl_runs.dataset())
    with pytest.raises(ValueError, match="the server behind it"):
        served(AsyncGRPOTrainer)


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_every_sample_of_the_worker_is_of_its_version(zoo, tmp_path, figures):
    model = zoo.model_with_tokenizer("slow")
    with (
        serve(model, settings={"model.device": "cpu"}) as server,
        running_gateway(server.grpc, "--tokenizer", model, scratch=tmp_path) as gateway,
    ):
        program = ROOT / "tests" / "lib" / "trl_worker.py"
        run = subprocess.run(
            [sys.executable, program, server.grpc, gateway.url, model, tmp_path / "out"],
            env=environment(PYTHONPATH=f"{ROOT / 'client' / 'src'}:{ROOT / 'tests'}"),
            capture_output=True,
            text=True,
            timeout=800,
        )
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
        with dorad.Client(server.grpc) as client:
            kinds = {version.kind for version in client.adapters()}
    rows = json.loads(run.stdout.splitlines()[-1])["rows"]
    assert kinds == {"dora"} and {row["version"] for row in rows} == {1, 2, 3}
    worst = 0.0
    for row in rows:
        best, second, _ = sorted(row["differences"].values())
        assert best < 1e-4 and second > 1e-2
        # A group's version is the one at its beginning; its later requests name a newer one.
        made = min(row["differences"], key=row["differences"].get)
        assert int(made) >= row["version"]
        worst = max(worst, best)
    figures.append(f"trl asynchronous DoRA: {len(rows)} samples, max |Δlogprob| {worst:.1e}")
