"""client/examples/grpo.py on a tiny random model: it agrees with the server, or it stops."""

import subprocess
import sys

import dorad
import dorad.train
import pytest
from lib import grpo_example
from lib.grpo_example import EXAMPLE
from lib.server import ROOT, binary, environment, serve


@pytest.fixture(scope="module")
def grpo():
    with grpo_example.loaded() as module:
        yield module


@pytest.fixture(scope="module")
def model(zoo, tmp_path_factory):
    return grpo_example.make_model(zoo, tmp_path_factory.mktemp("grpo") / "model")


@pytest.fixture
def client(model):
    # fp32 on both sides, wherever the other tests run.
    with (
        serve(model, settings={"model.device": "cpu"}) as server,
        dorad.Client(server.grpc) as client,
    ):
        yield client


def test_every_step_samples_the_version_it_published_and_agrees_on_it(grpo, model, client):
    steps = grpo.run(client, model, steps=2)
    assert [step.version for step in steps] == ["policy@1", "policy@2"]
    for step in steps:
        assert 0 < step.mean_difference <= step.max_difference < 1e-4
    versions = client.adapters("policy")
    assert [v.version for v in versions] == [1, 2, 3]
    assert [v.active for v in versions] == [False, False, True]
    assert versions[2].state == "ready" and versions[0].state == versions[1].state == "gone"
    assert len({v.digest for v in versions}) == 3, "a step did not change the adapter"


def test_the_same_seed_gives_the_same_run(grpo, model, client):
    first, second, other = (grpo.run(client, model, 1, seed)[0].reward for seed in (3, 3, 4))
    assert first == second != other


def test_with_the_same_seeds_the_last_answers_are_guesses(grpo, model, client, monkeypatch):
    generate_many, runs = client.generate_many, []

    def recorded(requests, answers):
        results = generate_many(requests, answers=answers)
        usages = [s.usage for samples in results for s in samples]
        accepted = sum(usage.accepted_draft_tokens for usage in usages)
        runs.append(([request.seed for request in requests], accepted))
        return results

    monkeypatch.setattr(client, "generate_many", recorded)
    steps = grpo.run(client, model, steps=2, same_seeds=True)
    (seeds, first), (again, second) = runs
    assert seeds == again and len(set(seeds)) == len(seeds)
    assert first == 0 < second
    monkeypatch.setattr(client, "generate_many", lambda requests, answers: generate_many(requests))
    plain = grpo.run(client, model, steps=2, same_seeds=True)
    assert [step.reward for step in steps] == [step.reward for step in plain]


def test_beside_the_server_it_publishes_the_same_from_memory(grpo, model, client, tmp_path):
    uploaded = grpo.run(client, model, steps=2, seed=3)
    path = tmp_path / "memory.sock"
    settings = {"model.device": "cpu", "server.shared_memory_socket": path}
    with (
        serve(model, settings=settings) as server,
        dorad.Client(server.grpc) as beside,
        dorad.SharedTensors(path) as shared,
    ):
        colocated = grpo.run(beside, model, steps=2, seed=3, shared=shared)
        digests = [version.digest for version in beside.adapters("policy")]
    assert [step.reward for step in colocated] == [step.reward for step in uploaded]
    assert digests == [version.digest for version in client.adapters("policy")]


def test_beside_the_server_it_trains_over_the_servers_base(grpo, model, tmp_path):
    settings = {"model.device": "cpu", "server.shared_memory_socket": tmp_path / "memory.sock"}
    with serve(model, settings=settings) as server, dorad.Client(server.grpc) as client:
        weights = dorad.train.base_weights(client)
        places = {tensor.data_ptr() for tensor in weights.values()}
        policy = grpo.make_policy(model, weights)
        frozen = [p for p in policy.parameters() if not p.requires_grad]
        assert {p.data_ptr() for p in frozen} == places
        (step,) = grpo.run(client, model, steps=1, weights=weights)
    assert 0 < step.mean_difference < 0.1


def test_tokens_of_an_unexpected_version_stop_it(grpo, model, client, monkeypatch):
    publish = client.publish

    def meddle(*arguments, **options):
        published = publish(*arguments, **options)
        publish(*arguments, **options)  # Somebody else's, which is active now.
        return published

    monkeypatch.setattr(client, "publish", meddle)
    with pytest.raises(RuntimeError, match=r"expected tokens of policy@1 .*version=2"):
        grpo.run(client, model, steps=1)


def test_a_policy_that_is_not_the_published_one_stops_it(grpo, model, client, monkeypatch):
    import torch

    publish = client.publish

    def publish_and_change(name, model):
        published = publish(name, model=model)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1.3)
        return published

    monkeypatch.setattr(client, "publish", publish_and_change)
    with pytest.raises(RuntimeError, match="trainer and server disagree"):
        grpo.run(client, model, steps=1)


@pytest.mark.parametrize("colocate", [False, True], ids=["upload", "colocate"])
def test_runs_a_server_of_its_own_and_prints_the_curve(model, tmp_path, colocate):
    command = [sys.executable, EXAMPLE, "--model", model, "--steps", "2"]
    command += ["--colocate", tmp_path / "memory.sock"] if colocate else []
    path = f"{ROOT / 'client' / 'src'}"
    run = subprocess.run(
        command,
        env=environment(DORAD_BINARY=str(binary()), PYTHONPATH=path),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["1", "policy@1"], ["2", "policy@2"]]
    assert lines[-3].startswith("Mean reward of 8 prompts x 8 answers")
    assert [line.split()[0] for line in lines[-2:]] == ["1", "2"]
