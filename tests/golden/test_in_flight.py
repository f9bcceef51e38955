"""Requests whose adapter gets a new active version while they run: whatever the policy, the spans
of the answer say how PEFT computes the same distribution for every token."""

from pathlib import Path

import dorad
import numpy as np
import pytest
import torch
from dorad.v1 import inference_pb2
from lib.oracle import compare
from lib.server import device, serve, wait_until
from lib.wire import RAW, Sample, collect

PROMPT = [17, 4, 99, 3, 250, 8, 1021, 77, 5]
TOKENS = 60
KIND = ["dora", "dora_patterns", "lora", "dora_r96"]  # of versions 1 to 4
VOCABULARY = list(range(2048))
KEEP = inference_pb2.IN_FLIGHT_POLICY_SWITCH_KEEP_KV
RECOMPUTE = inference_pb2.IN_FLIGHT_POLICY_SWITCH_RECOMPUTE
# On a GPU the server computes in bf16, PEFT in fp32.
MIN_COSINE, MAX_ERROR = (0.999999, 1e-4) if device() == "cpu" else (0.999, 1.0)


def replay(zoo, folders: list[Path], sample: Sample, policy: int) -> np.ndarray:
    """[tokens, V]: the distribution that each token was sampled from, computed by PEFT."""
    oracle = zoo.oracle("slow")
    rows, cache = [], None
    ids = PROMPT + sample.tokens
    with torch.inference_mode():
        # The row that predicts a token is computed by the token's version, over keys and values
        # of its own or over those that were made before.
        for _, version, _, first, end in sample.spans:
            known = 0 if policy == RECOMPUTE or cache is None else cache.get_seq_length()
            part = torch.tensor([ids[known : len(PROMPT) + end - 1]])
            model = oracle.load(folders[version - 1])
            output = model(part, past_key_values=cache if known else None, use_cache=True)
            cache = output.past_key_values
            rows.append(output.logits[0, -(end - first) :])
    return torch.log_softmax(torch.cat(rows).float(), dim=-1).numpy()


def run(server, policy: int, **options) -> dict[int, Sample]:
    """A stream of `policy`, with the next version activated each time that it got some tokens."""
    server.wire.activate("policy", 1)
    # Slow enough for a client on a busy machine.
    with dorad.Client(server.grpc) as client, client.limited_gpu_share(0.05):
        call = server.wire.stream(
            PROMPT,
            adapter="policy",
            max_tokens=TOKENS,
            ignore_eos=True,
            seed=5,
            logprobs=RAW,
            chosen=VOCABULARY,
            in_flight=policy,
            **options,
        )
        samples: dict[int, Sample] = {}
        version = 1
        for message in call:
            collect([message], samples)
            longest = max(len(sample.tokens) for sample in samples.values())
            if version < len(KIND) and longest >= 12 * version:
                version += 1
                server.wire.activate("policy", version)
    return samples


@pytest.fixture(scope="module")
def folders(zoo) -> list[Path]:
    return [zoo.adapter("slow", kind, seed=i) for i, kind in enumerate(KIND)]


def publish_all(server, folders: list[Path]) -> None:
    for folder in folders:
        server.wire.publish("policy", folder)


def check(zoo, folders, figures, samples: dict[int, Sample], policy: int, what: str) -> None:
    for sample in samples.values():
        assert len(sample.tokens) == TOKENS
        assert [span[1] for span in sample.spans] == sorted({span[1] for span in sample.spans})
        assert sample.spans[0][3] == 0 and sample.spans[-1][4] == TOKENS
        expected = replay(zoo, folders, sample, policy)
        cosine, error = compare(sample.chosen, expected)
        figures.append(f"in flight, {what}: cos >= {cosine:.9f}, max |Δlogprob| {error:.1e}")
        assert cosine >= MIN_COSINE and error <= MAX_ERROR
        own = expected[np.arange(TOKENS), sample.tokens]
        assert np.abs(sample.logprobs - own).max() <= MAX_ERROR


@pytest.mark.parametrize(("policy", "what"), [(KEEP, "KV kept"), (RECOMPUTE, "recomputed")])
def test_spans_of_a_request_that_switches_replay_exactly(
    zoo, folders, figures, policy: int, what: str
) -> None:
    with serve(zoo.model("slow")) as server:
        publish_all(server, folders)
        samples = run(server, policy)
        assert [span[1] for span in samples[0].spans] == [1, 2, 3, 4]
        check(zoo, folders, figures, samples, policy, what)
        assert server.metric("dorad_engine_version_switches_total") == 3
        assert server.wire.info().engine.adapter_leases == 0


@pytest.mark.parametrize("policy", [KEEP, RECOMPUTE])
def test_samples_switch_together_when_pages_are_short(zoo, folders, figures, policy: int) -> None:
    # 10 pages of 16 tokens: three samples of 69 tokens do not fit. With the KV kept some are
    # preempted and computed anew, by the versions that computed them first; samples that begin
    # anew wait for their turn.
    page_bytes = 16 * 6 * 2 * 2 * 64 * (4 if device() == "cpu" else 2)
    settings = {"engine.kv_bytes": 10 * page_bytes, "engine.prefix_cache": False}
    with serve(zoo.model("slow"), None, settings) as server:
        publish_all(server, folders)
        samples = run(server, policy, n=3)
        check(zoo, folders, figures, samples, policy, "three samples and few pages")
        if policy == KEEP:
            assert server.metric("dorad_engine_preemptions_total") > 0
        # The engine counts a sequence's end after it has sent the last answer.
        wait_until(lambda: server.wire.info().engine.kv_pages_used == 0, what="no page is in use")


def test_a_pinned_request_ignores_activations(zoo, folders) -> None:
    with serve(zoo.model("slow")) as server:
        publish_all(server, folders)
        pinned = run(server, inference_pb2.IN_FLIGHT_POLICY_PIN)[0]
        assert [span[1] for span in pinned.spans] == [1]
        (alone,) = server.wire.generate(
            PROMPT, adapter="policy@1", max_tokens=TOKENS, ignore_eos=True, seed=5
        )
        assert pinned.tokens == alone.tokens


def test_a_switch_does_not_fill_the_prefix_cache_with_mixed_pages(zoo, folders) -> None:
    with serve(zoo.model("slow")) as server:
        publish_all(server, folders)
        sample = run(server, KEEP)[0]
        prompt = PROMPT + sample.tokens
        for version in range(1, len(KIND) + 1):
            options = dict(adapter=f"policy@{version}", max_tokens=1, logprobs=RAW, seed=1)
            cold = server.wire.generate(prompt, bypass=True, **options)[0]
            warm = server.wire.generate(prompt, **options)[0]
            assert warm.tokens == cold.tokens and warm.logprobs == cold.logprobs
            # What version 1 alone has made, if it is version 1.
            cached = len(PROMPT) + sample.spans[0][4] - 1 if version == 1 else 0
            assert warm.finish.usage.cached_prompt_tokens == cached
