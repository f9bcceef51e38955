"""Penalties, biases, allowed tokens and bad words against the processors of transformers, applied
to the logits of transformers in fp32."""

import numpy as np
import pytest
import torch
from lib.server import device, serve
from lib.tiers import deep
from lib.tiny_models import VOCAB
from lib.wire import PROCESSED, RAW, SCALED, Sample
from transformers import (
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

pytestmark = pytest.mark.skipif(device() != "cpu", reason="fp32; the GPU's kernels have unit tests")

FAMILY = "llama2"
SETTINGS = 200 if deep() else 120
TOKENS = 16
VOCABULARY = list(range(VOCAB))
MAX_ERROR = 1e-4  # times the largest factor of a penalty


def settings(seed: int) -> dict:
    """A request with some of the fields. Its tokens are few: they repeat, and bad words occur."""
    rng = np.random.default_rng(seed)
    ids = rng.choice(np.arange(6, VOCAB), size=12, replace=False)
    request: dict = dict(
        prompt=rng.choice(ids, size=rng.integers(2, 12)).tolist(),
        temperature=0.0 if seed % 4 == 0 else float(rng.choice([0.7, 1.0, 1.4])),
        seed=seed,
        max_tokens=TOKENS,
        ignore_eos=True,
    )
    if rng.random() < 0.5:
        request["presence_penalty"] = float(rng.uniform(-2, 2))
    if rng.random() < 0.5:
        request["frequency_penalty"] = float(rng.uniform(-2, 2))
    if rng.random() < 0.5:
        request["repetition_penalty"] = float(rng.uniform(0.5, 2))
    if rng.random() < 0.5:
        request["logit_bias"] = {int(i): float(rng.uniform(-5, 5)) for i in ids[:5]}
    if rng.random() < 0.6:
        request["allowed"] = sorted(ids.tolist())
    if rng.random() < 0.6:
        words = [rng.choice(ids, size=rng.integers(2, 4)).tolist() for _ in range(60)]
        request["bad_words"] = [*words, [int(ids[0])]]
    return request


def processed(logits: torch.Tensor, request: dict, generated: list[int]) -> torch.Tensor:
    """The logits [V] that the token after `generated` is sampled from, before the temperature."""
    scores = logits[None].clone()
    if "allowed" in request:
        forbidden = torch.ones(VOCAB, dtype=torch.bool)
        forbidden[request["allowed"]] = False
        scores[:, forbidden] = -torch.inf
    if "bad_words" in request:
        # transformers compares the prompt, too, and skips words of the text's length.
        text = torch.tensor([[-1] * 4 + generated])
        scores = NoBadWordsLogitsProcessor(request["bad_words"])(text, scores)
    if "logit_bias" in request:
        biases = {(token,): bias for token, bias in request["logit_bias"].items()}
        scores = SequenceBiasLogitsProcessor(biases)(torch.tensor([[0]]), scores)
    if "repetition_penalty" in request:
        processor = RepetitionPenaltyLogitsProcessor(request["repetition_penalty"])
        scores = processor(torch.tensor([request["prompt"] + generated]), scores)
    counts = torch.bincount(torch.tensor(generated, dtype=torch.long), minlength=VOCAB)
    scores = scores - request.get("frequency_penalty", 0.0) * counts
    return (scores - request.get("presence_penalty", 0.0) * (counts > 0))[0]


def expected(zoo, request: dict, sample: Sample) -> torch.Tensor:
    """[tokens, V]: the processed logits of each position."""
    tokens = sample.tokens
    with torch.inference_mode():
        rows = zoo.oracle(FAMILY).load(None)(torch.tensor([request["prompt"] + tokens])).logits[0]
    begin = len(request["prompt"]) - 1
    return torch.stack(
        [processed(rows[begin + i].float(), request, tokens[:i]) for i in range(len(tokens))]
    )


def holds(tokens: list[int], word: list[int]) -> bool:
    return any(tokens[i : i + len(word)] == word for i in range(len(tokens)))


@pytest.fixture(scope="module")
def server(zoo):
    with serve(zoo.model(FAMILY), settings={"engine.kv_bytes": 16 << 20}) as server:
        yield server


@pytest.fixture(scope="module")
def requests() -> list[dict]:
    return [settings(seed) for seed in range(SETTINGS)]


@pytest.fixture(scope="module")
def samples(server, requests) -> list[Sample]:
    wanted = dict(logprobs=PROCESSED, chosen=VOCABULARY)
    return [samples[0] for samples in server.wire.generate_many([r | wanted for r in requests])]


def test_processed_logprobs_are_those_of_transformers(zoo, requests, samples) -> None:
    compared = 0
    for request, sample in zip(requests, samples, strict=True):
        if request["temperature"] == 0.0:
            continue
        rows = expected(zoo, request, sample)
        oracle = torch.log_softmax(rows / request["temperature"], dim=-1).numpy()
        impossible = np.isneginf(oracle)
        assert np.array_equal(np.isneginf(sample.chosen), impossible), request
        error = np.abs(sample.chosen[~impossible] - oracle[~impossible]).max()
        factor = max(1.0, request.get("repetition_penalty", 1.0)) / request["temperature"]
        assert error <= MAX_ERROR * max(1.0, factor), (request, error)
        compared += len(sample.tokens)
    assert compared > SETTINGS / 2 * TOKENS


def test_greedy_tokens_are_those_of_transformers(zoo, requests, samples) -> None:
    compared = 0
    for request, sample in zip(requests, samples, strict=True):
        if request["temperature"] > 0.0:
            continue
        best = torch.topk(expected(zoo, request, sample), 2, dim=-1)
        for row, token in enumerate(sample.tokens):
            # A near tie may fall either way.
            if best.values[row, 0] - best.values[row, 1] > 1e-3:
                assert token == best.indices[row, 0], request
                compared += 1
    assert compared > SETTINGS / 5 * TOKENS


def test_samples_hold_allowed_tokens_and_no_bad_words(requests, samples) -> None:
    held = 0
    for request, sample in zip(requests, samples, strict=True):
        assert len(sample.tokens) == TOKENS
        if "allowed" in request:
            assert set(sample.tokens) <= set(request["allowed"])
        assert not any(holds(sample.tokens, word) for word in request.get("bad_words", ()))
        held += len(set(sample.tokens)) < TOKENS
    assert held > SETTINGS / 4, "tokens do not repeat: most fields would have no effect"


def test_raw_logprobs_are_of_the_model(server, requests) -> None:
    for request in requests[:20]:
        (sample,) = server.wire.generate(**request, logprobs=RAW, chosen=VOCABULARY)
        ((score,),) = server.wire.score([request["prompt"] + sample.tokens], chosen=VOCABULARY)
        begin = len(request["prompt"])
        assert score.chosen[begin:].tobytes() == sample.chosen.tobytes()


@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.6}, {"top_k": 3}, {"min_p": 0.2}])
def test_scaled_logprobs_are_those_of_score_at_the_temperature(
    server, requests, truncation
) -> None:
    for request in [r for r in requests[:30] if r["temperature"] > 0.0]:
        wanted = dict(logprobs=SCALED, chosen=VOCABULARY, top_logprobs=3)
        (sample,) = server.wire.generate(**request, **truncation, **wanted)
        ((score,),) = server.wire.score(
            [request["prompt"] + sample.tokens],
            temperature=request["temperature"],
            top_k=3,
            chosen=VOCABULARY,
        )
        begin = len(request["prompt"])
        assert score.logprobs[begin:].tobytes() == sample.logprobs.tobytes()
        assert score.chosen[begin:].tobytes() == sample.chosen.tobytes()
        assert score.top_ids[begin:].tolist() == sample.top_ids.tolist()


def test_without_a_possible_token_a_sample_ends(server) -> None:
    request = dict(prompt=[7, 8], allowed=[9, 10], bad_words=[[9], [10, 10]], max_tokens=5)
    (sample,) = server.wire.generate(**request, ignore_eos=True)
    assert sample.tokens == [10]
    assert "no token may be sampled" in sample.finish.detail
