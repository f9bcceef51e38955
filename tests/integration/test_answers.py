"""dorad.Answers: the answers of an adapter's last version as drafts of the next one's."""

import dorad
import numpy as np
import pytest
from lib.server import serve
from safetensors.numpy import load_file

TOKENS = 48
PROMPTS = [[11, 12, 13 + i, 40] for i in range(6)]
REQUESTS = [
    dorad.GenerateRequest(
        prompt,
        adapter="policy",
        n=2,
        seed=seed,
        max_tokens=TOKENS,
        ignore_eos=True,
        logprobs="raw",
    )
    for seed, prompt in enumerate(PROMPTS)
]


def publish(client, folder, change: float) -> dorad.AdapterVersion:
    """The adapter of the folder, moved a little."""
    tensors = load_file(folder / "adapter_model.safetensors")
    moved = {name: np.asarray(tensor * (1 + change)) for name, tensor in tensors.items()}
    config = (folder / "adapter_config.json").read_text()
    return client.publish("policy", tensors=moved, config=config)


def content(results) -> list:
    return [
        (s.token_ids.tolist(), s.logprobs.tobytes(), s.finish_reason, s.spans, s.seed)
        for samples in results
        for s in samples
    ]


def accepted(results) -> int:
    return sum(s.usage.accepted_draft_tokens for samples in results for s in samples)


@pytest.mark.parametrize("kind", [dorad.Client, dorad.RolloutPool])
def test_answers_of_the_last_version_save_time_and_leave_no_trace(zoo, kind):
    folder, answers = zoo.adapter("llama2", "dora"), dorad.Answers()
    with serve(zoo.model("llama2")) as server:
        with kind(server.grpc if kind is dorad.Client else [server.grpc]) as client:
            publish(client, folder, 0)
            first = client.generate_many(REQUESTS, answers=answers)
            assert accepted(first) == 0
            second = publish(client, folder, 1e-4)
            plain = client.generate_many(REQUESTS)
            drafted = client.generate_many(REQUESTS, answers=answers)
        assert content(drafted) == content(plain) != content(first)
        assert {span.version for samples in drafted for s in samples for span in s.spans} == {
            second.version
        }
        assert accepted(plain) == 0
        assert accepted(drafted) > len(PROMPTS) * 2 * TOKENS / 4
        counted = server.metric("dorad_draft_accepted_tokens_total", source="answer")
        assert counted == accepted(drafted)
