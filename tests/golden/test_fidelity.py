"""Full-vocabulary log-probabilities of Score and Generate against transformers + PEFT in fp32,
for every supported family and every kind of adapter."""

import numpy as np
import pytest
from lib import tiny_models
from lib.adapters import KINDS
from lib.oracle import compare
from lib.server import serve
from lib.tiny_models import VOCAB
from lib.wire import PROCESSED, RAW

MIN_COSINE = 0.999999
MAX_ERROR = 1e-4
NEW_TOKENS = 12

FAMILIES = [family.name for family in tiny_models.FAMILIES]
ADAPTERS = ["base"] + [kind.name for kind in KINDS]
VOCABULARY = list(range(VOCAB))


class Served:
    """One server of a family with every kind of adapter loaded."""

    def __init__(self, zoo, family: str, server) -> None:
        self.zoo, self.family, self.server = zoo, family, server
        self.worst = {"Score": (1.0, 0.0), "Generate": (1.0, 0.0)}

    def oracle(self, kind: str, sequences: list[list[int]]) -> list[np.ndarray]:
        return self.zoo.next_logprobs(self.family, kind, sequences)


def wire_name(kind: str) -> str:
    return "" if kind == "base" else kind.replace("_", "-")


@pytest.fixture(scope="module", params=FAMILIES)
def served(request, zoo, figures):
    family = request.param
    folders = {wire_name(kind.name): zoo.adapter(family, kind.name) for kind in KINDS}
    with serve(zoo.model(family), folders, {"engine.kv_bytes": 16 << 20}) as server:
        served = Served(zoo, family, server)
        yield served
    for call, (cosine, error) in served.worst.items():
        figures.append(f"{family} {call}: cos >= {cosine:.9f}, max |Δlogprob| {error:.1e}")


def assert_faithful(served: Served, call: str, ours: np.ndarray, oracle: np.ndarray) -> None:
    cosine, error = compare(ours, oracle)
    before = served.worst[call]
    served.worst[call] = (min(before[0], cosine), max(before[1], error))
    assert np.ptp(oracle, axis=-1).mean() > 3, "the distribution is flat: errors would not show"
    assert cosine >= MIN_COSINE and error <= MAX_ERROR, f"cos {cosine:.9f}, max |Δ| {error:.2e}"


@pytest.mark.parametrize("kind", ADAPTERS)
def test_score_equals_oracle(served: Served, kind: str) -> None:
    sequences = served.zoo.sequences(served.family)
    expected = served.oracle(kind, sequences)
    scores = served.server.wire.score(sequences, [wire_name(kind)], chosen=VOCABULARY)
    for ids, (score,), oracle in zip(sequences, scores, expected, strict=True):
        assert np.isnan(score.logprobs[0]) and np.isnan(score.chosen[0]).all()
        assert_faithful(served, "Score", score.chosen[1:], oracle[:-1])
        targets = oracle[np.arange(len(ids) - 1), ids[1:]]
        assert np.abs(score.logprobs[1:] - targets).max() <= MAX_ERROR


@pytest.mark.parametrize("kind", ADAPTERS)
def test_generate_equals_oracle(served: Served, kind: str) -> None:
    """The tokens are drawn by the server; the oracle then reads prompt and tokens at once."""
    prompt = served.zoo.sequences(served.family)[1]
    (sample,) = served.server.wire.generate(
        prompt,
        adapter=wire_name(kind),
        seed=3,
        temperature=1.0,
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        logprobs=RAW,
        chosen=VOCABULARY,
    )
    assert len(sample.tokens) == NEW_TOKENS
    (expected,) = served.oracle(kind, [prompt + sample.tokens])
    expected = expected[len(prompt) - 1 : -1]
    assert_faithful(served, "Generate", sample.chosen, expected)
    chosen = sample.chosen[np.arange(NEW_TOKENS), sample.tokens]
    assert np.array_equal(chosen, sample.logprobs)


@pytest.mark.parametrize("kind", ["base", "dora", "lora"])
def test_prompt_logprobs_equal_oracle(served: Served, kind: str) -> None:
    sequences = served.zoo.sequences(served.family)
    expected = served.oracle(kind, sequences)
    for ids, oracle in zip(sequences, expected, strict=True):
        (sample,) = served.server.wire.generate(
            ids,
            adapter=wire_name(kind),
            max_tokens=1,
            logprobs=PROCESSED,
            chosen=VOCABULARY,
            prompt_logprobs=True,
        )
        assert sample.prompt is not None and len(sample.prompt.logprobs) == len(ids)
        assert np.isnan(sample.prompt.logprobs[0]) and np.isnan(sample.prompt.chosen[0]).all()
        assert_faithful(served, "Generate", sample.prompt.chosen[1:], oracle[:-1])
        targets = oracle[np.arange(len(ids) - 1), ids[1:]]
        assert np.abs(sample.prompt.logprobs[1:] - targets).max() <= MAX_ERROR


def test_adapters_differ_from_base(served: Served) -> None:
    """Guards the comparison itself: an adapter that changed nothing would prove nothing."""
    (sequence,) = served.zoo.sequences(served.family)[1:2]
    names = [wire_name(kind) for kind in ADAPTERS]
    (scores,) = served.server.wire.score([sequence], names)
    base = scores[0].logprobs[1:]
    for kind, score in zip(ADAPTERS[1:], scores[1:], strict=True):
        assert np.abs(score.logprobs[1:] - base).max() > 0.05, kind


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_no_worse_than_peft_in_bf16(zoo, figures, family: str) -> None:
    """Mean |Δlogprob| over the vocabulary and all positions, against the same fp32 oracle."""
    kinds = ["base", "dora", "lora", "dora_patterns", "dora_everything"]
    preload = {wire_name(kind): zoo.adapter(family, kind) for kind in kinds[1:]}
    sequences = zoo.sequences(family, seed=11)
    settings = {"model.compute_dtype": "bf16", "engine.kv_bytes": 16 << 20}
    ours_total, peft_total = 0.0, 0.0
    with serve(zoo.model(family), preload, settings) as server:
        scores = server.wire.score(
            sequences, [wire_name(kind) for kind in kinds], chosen=VOCABULARY
        )
        for column, kind in enumerate(kinds):
            oracle = np.concatenate(zoo.next_logprobs(family, kind, sequences))
            theirs = np.concatenate(zoo.next_logprobs(family, kind, sequences, "bfloat16"))
            rows = np.concatenate([np.r_[np.ones(len(ids) - 1, bool), False] for ids in sequences])
            ours = np.concatenate([score[column].chosen[1:] for score in scores])
            ours_error = np.abs(ours - oracle[rows]).mean()
            peft_error = np.abs(theirs[rows] - oracle[rows]).mean()
            figures.append(
                f"{family} {kind} in bf16: mean |Δ| {ours_error:.1e}, PEFT's {peft_error:.1e}"
            )
            assert compare(ours, oracle[rows])[0] > 0.999
            ours_total += ours_error
            peft_total += peft_error
    assert ours_total <= peft_total
