"""TRL's asynchronous GRPO: VLLMClient and AsyncRolloutWorker against gateway and server."""

import numpy as np
import pytest
import torch

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def models(zoo, adapters):
    """By version."""
    return {v: zoo.oracle("slow").load(adapters / f"lora-{v - 1}") for v in (1, 2, 3)}


def error(model, sample):
    """The largest difference from PEFT's log-probabilities at the temperature."""
    ids = torch.tensor([sample["ids"]])
    with torch.inference_mode():
        rows = torch.log_softmax(model(ids).logits[0].float() / TEMPERATURE, dim=-1)
    own = rows[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
    made = np.array(sample["mask"][1:], dtype=bool)
    assert made.any()
    return float(np.abs(own - np.array(sample["logprobs"][1:]))[made].max())


def test_samples_have_the_logprobs_of_their_version(
    gateway, client, folder, adapters, models, drive, result_of, figures
):
    with (
        gateway("--logprobs-mode", "scaled") as running,
        drive("trl", running.url, folder, adapters) as program,
    ):
        found = result_of(program)
        # The worker would repeat refused requests silently.
        ended = [line for line in running.log() if line["msg"] == "request ended"]
    codes = {line["status"] for line in ended if line["endpoint"] == "completions"}
    assert codes <= {"200", "499"}, codes  # 499: in flight when the worker stopped.
    info = client.info()
    assert found["by_adapter"] is True and found["dtype"] == "torch.float32"
    assert found["max_model_len"] == info.model.context_length and found["world_size"] == 1
    samples, used, worst = found["samples"], set(), 0.0
    for sample in samples:
        errors = {version: error(model, sample) for version, model in models.items()}
        best = min(errors, key=errors.get)
        # A group's version is the one at its beginning; its later requests name a newer one.
        assert best >= sample["version"]
        assert errors[best] < 1e-4 and sorted(errors.values())[1] > 1e-2
        used.add(best)
        worst = max(worst, errors[best])
    figures.append(f"TRL: {len(samples)} samples, max |Δlogprob| {worst:.1e}")
    assert used == {1, 2, 3}
    names = {v.name for v in client.adapters() if v.state == "ready"}
    assert "trl-policy-v1" not in names and {"trl-policy-v2", "trl-policy-v3"} <= names
