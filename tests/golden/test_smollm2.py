"""SmolLM2-135M-Instruct with the two DoRA adapters that the demo trains, against transformers +
PEFT."""

import numpy as np
import pytest
import torch
from lib.oracle import Oracle, compare
from lib.server import Server, serve
from lib.tiers import deep
from lib.wire import RAW

pytestmark = pytest.mark.timeout(900)

MIN_COSINE = 0.999999
MAX_ERROR = 1e-4
GREEDY_TOKENS = 128 if deep() else 48
SCORED_TOKENS = 48

# "What is the capital of France?" and "Tell me about the sea." in the model's chat template.
PROMPTS = [
    [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198],
    [1, 4093, 198, 31530, 549, 563, 260, 3426, 30, 2, 198, 1, 520, 9531, 198],
]


@pytest.fixture(scope="module")
def oracle(smollm2) -> Oracle:
    return Oracle(smollm2.model)


def settings(compute: str) -> dict:
    return {
        "model.compute_dtype": compute,
        "engine.kv_bytes": 256 << 20,
        "limits.max_chosen_ids": 65536,
        "server.max_message_bytes": 256 << 20,
    }


@pytest.fixture(scope="module")
def server(smollm2):
    with serve(smollm2.model, smollm2.adapters, settings("fp32")) as running:
        yield running


def variants(smollm2) -> list[tuple[str, object]]:
    return [("", None), *smollm2.adapters.items()]


def vocabulary(server: Server) -> list[int]:
    return list(range(server.wire.info().model.vocab_size))


def scored_sequence() -> list[int]:
    rng = np.random.default_rng(3)
    return PROMPTS[0] + rng.integers(100, 40000, SCORED_TOKENS - len(PROMPTS[0])).tolist()


def test_full_vocabulary_equals_oracle(smollm2, oracle: Oracle, server: Server, figures) -> None:
    ids = scored_sequence()
    for name, folder in variants(smollm2):
        (expected,) = oracle.next_logprobs(folder, [ids])
        ((score,),) = server.wire.score([ids], [name], chosen=vocabulary(server))
        cosine, error = compare(score.chosen[1:], expected[:-1])
        figures.append(f"SmolLM2 {name or 'base'}: cos {cosine:.9f}, max |Δlogprob| {error:.1e}")
        assert cosine >= MIN_COSINE and error <= MAX_ERROR, name


def test_generated_distributions_equal_oracle(smollm2, oracle: Oracle, server: Server) -> None:
    prompt = PROMPTS[1]
    for name, folder in variants(smollm2):
        (sample,) = server.wire.generate(
            prompt,
            adapter=name,
            seed=1,
            max_tokens=12,
            ignore_eos=True,
            logprobs=RAW,
            chosen=vocabulary(server),
        )
        (expected,) = oracle.next_logprobs(folder, [prompt + sample.tokens])
        cosine, error = compare(sample.chosen, expected[len(prompt) - 1 : -1])
        assert cosine >= MIN_COSINE and error <= MAX_ERROR, name


def test_greedy_tokens_equal_oracle(smollm2, oracle: Oracle, server: Server) -> None:
    """All in one mixed batch. The oracle reads prompt and answer at once and must agree with every
    token: that is what its own greedy decoding would have given."""
    requests = [
        dict(
            prompt=prompt,
            adapter=name,
            temperature=0.0,
            max_tokens=GREEDY_TOKENS,
            ignore_eos=True,
            logprobs=RAW,
        )
        for name, _ in variants(smollm2)
        for prompt in PROMPTS
    ]
    answers = server.wire.generate_many(requests, timeout=300)
    folders = dict(variants(smollm2))
    for request, (sample,) in zip(requests, answers, strict=True):
        prompt, tokens = request["prompt"], sample.tokens
        assert len(tokens) == GREEDY_TOKENS
        (rows,) = oracle.next_logprobs(folders[request["adapter"]], [prompt + tokens])
        expected = rows[len(prompt) - 1 : -1]
        assert expected.argmax(axis=-1).tolist() == tokens, request["adapter"]
        error = np.abs(expected[np.arange(GREEDY_TOKENS), tokens] - sample.logprobs).max()
        assert error <= MAX_ERROR


def test_bf16_is_no_worse_than_peft_in_bf16(smollm2, oracle: Oracle, figures) -> None:
    """Mean |Δlogprob| over the vocabulary and all positions, against the fp32 oracle."""
    ids = scored_sequence()
    peft = Oracle(smollm2.model, torch.bfloat16)
    with serve(smollm2.model, smollm2.adapters, settings("bf16")) as server:
        for name, folder in variants(smollm2):
            (exact,) = oracle.next_logprobs(folder, [ids])
            (theirs,) = peft.next_logprobs(folder, [ids])
            ((score,),) = server.wire.score([ids], [name], chosen=vocabulary(server))
            ours_error = np.abs(score.chosen[1:] - exact[:-1]).mean()
            peft_error = np.abs(theirs[:-1] - exact[:-1]).mean()
            figures.append(
                f"SmolLM2 {name or 'base'} in bf16: mean |Δ| {ours_error:.1e},"
                f" PEFT's {peft_error:.1e}"
            )
            assert ours_error <= peft_error, name
