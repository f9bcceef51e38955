"""What Generate and Score promise beyond the numbers: stopping, seeds, samples, and modes of
log-probabilities."""

import grpc
import numpy as np
import pytest
from lib.server import Server, is_idle, serve, wait_until
from lib.tiny_models import CONTEXT, VOCAB
from lib.wire import (
    FINAL,
    LENGTH,
    NON_FINITE,
    PROCESSED,
    RAW,
    STOP,
    STREAM,
    failure,
)

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
VOCABULARY = list(range(VOCAB))


@pytest.fixture(scope="module")
def server(zoo):
    folders = {"a": zoo.adapter("llama2", "dora"), "b": zoo.adapter("llama2", "lora")}
    with serve(zoo.model("llama2"), folders, {"engine.kv_bytes": 32 << 20}) as running:
        yield running


def greedy(server: Server, tokens: int, **options) -> list[int]:
    options = dict(temperature=0.0, max_tokens=tokens, ignore_eos=True) | options
    return server.wire.generate(PROMPT, **options)[0].tokens


# --- Stopping.


def test_max_tokens_is_exact(server: Server) -> None:
    (sample,) = server.wire.generate(PROMPT, max_tokens=7, ignore_eos=True, seed=1)
    assert len(sample.tokens) == 7 and sample.reason == LENGTH
    usage = sample.finish.usage
    assert (usage.prompt_tokens, usage.generated_tokens) == (len(PROMPT), 7)


def test_default_max_tokens_fills_the_context(server: Server) -> None:
    prompt = PROMPT * (CONTEXT // len(PROMPT))
    (sample,) = server.wire.generate(prompt, ignore_eos=True, seed=1)
    assert len(prompt) + len(sample.tokens) == CONTEXT and sample.reason == LENGTH


def test_stop_token_ends_the_sample_and_is_its_last_token(server: Server) -> None:
    tokens = greedy(server, 30)
    stop = next(token for index, token in enumerate(tokens) if index >= 5)
    end = tokens.index(stop)
    (sample,) = server.wire.generate(
        PROMPT, temperature=0.0, max_tokens=30, ignore_eos=True, stop=[299, stop]
    )
    assert sample.tokens == tokens[: end + 1]
    assert sample.reason == STOP and sample.finish.stop_token_id == stop


def test_stop_sequence_ends_the_sample_and_stays_in_it(server: Server) -> None:
    tokens = greedy(server, 30)
    options = dict(temperature=0.0, max_tokens=30, ignore_eos=True)
    for begin, end in [(9, 14), (0, 5), (20, 30), (7, 8)]:
        sequences = [[299, 298], tokens[begin:end]]
        first = next(i for i in range(1, 31) if tokens[:i][begin - end :] == tokens[begin:end])
        for mode in (FINAL, STREAM):
            (sample,) = server.wire.generate(PROMPT, stop_sequences=sequences, mode=mode, **options)
            assert sample.tokens == tokens[:first]
            assert sample.reason == STOP and sample.finish.stop_sequence == 1
            assert not sample.finish.HasField("stop_token_id")
    (sample,) = server.wire.generate(PROMPT, stop_sequences=[[299, 298]], **options)
    assert sample.tokens == tokens and not sample.finish.HasField("stop_sequence")


def test_min_tokens_bans_stop_tokens_until_then(server: Server) -> None:
    tokens = greedy(server, 30)
    stop = tokens[3]
    (sample,) = server.wire.generate(
        PROMPT, temperature=0.0, max_tokens=60, min_tokens=12, stop=[stop]
    )
    assert stop not in sample.tokens[:12] and 2 not in sample.tokens[:12]
    assert len(sample.tokens) > 12 or sample.reason == STOP
    assert sample.tokens[:3] == tokens[:3]


def test_end_of_sequence_stops_unless_ignored(server: Server) -> None:
    options = dict(n=64, temperature=8.0, seed=4, max_tokens=40)
    samples = server.wire.generate(PROMPT, **options)
    stopped = [sample for sample in samples if sample.reason == STOP]
    assert stopped, "no end of sequence in 2560 nearly uniform draws"
    for sample in samples:
        assert 2 not in sample.tokens[:-1]
        assert (sample.reason == STOP) == (sample.tokens[-1] == 2)
    ignored = server.wire.generate(PROMPT, ignore_eos=True, **options)
    assert all(sample.reason == LENGTH for sample in ignored)
    assert any(2 in sample.tokens for sample in ignored)
    for short, full in zip(samples, ignored, strict=True):
        assert full.tokens[: len(short.tokens)] == short.tokens


# --- Seeds and samples.


def test_seed_reproduces_and_is_reported(server: Server) -> None:
    options = dict(max_tokens=16, ignore_eos=True, temperature=1.0)
    (chosen,) = server.wire.generate(PROMPT, **options)
    (again,) = server.wire.generate(PROMPT, seed=chosen.seed, **options)
    assert again.tokens == chosen.tokens and again.seed == chosen.seed
    (other,) = server.wire.generate(PROMPT, seed=chosen.seed + 1, **options)
    assert other.tokens != chosen.tokens


def test_samples_are_distinct_and_complete(server: Server) -> None:
    samples = server.wire.generate(
        PROMPT, n=8, temperature=1.0, seed=9, max_tokens=10, ignore_eos=True
    )
    assert len({tuple(sample.tokens) for sample in samples}) == 8
    assert {len(sample.tokens) for sample in samples} == {10}


def test_draws_follow_the_distribution(server: Server) -> None:
    """First tokens of 4096 draws against the raw distribution: total variation distance."""
    (sample,) = server.wire.generate(
        PROMPT, max_tokens=1, temperature=1.0, seed=0, logprobs=RAW, chosen=VOCABULARY
    )
    p = np.exp(sample.chosen[0].astype(np.float64))
    assert abs(p.sum() - 1) < 1e-4
    draws = [
        sample.tokens[0]
        for seed in range(32)
        for sample in server.wire.generate(
            PROMPT, n=128, max_tokens=1, temperature=1.0, seed=seed, ignore_eos=True
        )
    ]
    observed = np.bincount(draws, minlength=VOCAB) / len(draws)
    expected_noise = np.sqrt(2 * p * (1 - p) / (np.pi * len(draws))).sum() / 2
    distance = np.abs(observed - p).sum() / 2
    assert distance < 1.25 * expected_noise, (distance, expected_noise)


# --- Log-probabilities.


def test_top_logprobs_are_sorted_and_match_chosen(server: Server) -> None:
    (sample,) = server.wire.generate(
        PROMPT,
        temperature=0.0,
        max_tokens=6,
        ignore_eos=True,
        logprobs=RAW,
        top_logprobs=5,
        chosen=VOCABULARY,
    )
    for row in range(6):
        order = np.lexsort((VOCABULARY, -sample.chosen[row]))[:5]
        assert sample.top_ids[row].tolist() == order.tolist()
        assert np.array_equal(sample.top_logprobs[row], sample.chosen[row][order])
        assert sample.tokens[row] == order[0]
        assert sample.logprobs[row] == sample.top_logprobs[row][0]


def processed_reference(raw: np.ndarray, temperature, top_k, top_p, min_p) -> np.ndarray:
    """Temperature, then top-k, then top-p within it, then min-p; renormalised."""
    scaled = raw.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.lexsort((np.arange(len(p)), -p))
    kept = order[:top_k] if top_k else order
    mass = p[kept] / p[kept].sum()
    kept = kept[: int(np.searchsorted(np.cumsum(mass), top_p) + 1)]
    kept = kept[p[kept] >= min_p * p[kept].max()]
    result = np.full(len(p), -np.inf)
    result[kept] = np.log(p[kept] / p[kept].sum())
    return result


@pytest.mark.parametrize(
    "options",
    [
        dict(temperature=0.7),
        dict(temperature=1.5, top_k=5),
        dict(temperature=1.0, top_p=0.6),
        dict(temperature=1.2, min_p=0.2),
        dict(temperature=0.9, top_k=20, top_p=0.8, min_p=0.05),
    ],
    ids=lambda options: "-".join(options),
)
def test_processed_logprobs_are_of_the_sampled_distribution(server: Server, options) -> None:
    common = dict(seed=21, max_tokens=12, ignore_eos=True, chosen=VOCABULARY, **options)
    (raw,) = server.wire.generate(PROMPT, logprobs=RAW, **common)
    (processed,) = server.wire.generate(PROMPT, logprobs=PROCESSED, **common)
    assert raw.tokens == processed.tokens
    limits = dict(top_k=0, top_p=1.0, min_p=0.0) | options
    for row, token in enumerate(raw.tokens):
        expected = processed_reference(raw.chosen[row], **limits)
        assert np.isfinite(expected[token]), "a token outside the truncated set was drawn"
        assert abs(processed.logprobs[row] - expected[token]) < 1e-4
        finite = np.isfinite(expected)
        assert np.abs(processed.chosen[row][finite] - expected[finite]).max() < 1e-4
        assert np.isneginf(processed.chosen[row][~finite]).all()


def test_greedy_processed_logprob_is_zero(server: Server) -> None:
    (sample,) = server.wire.generate(
        PROMPT, temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=PROCESSED
    )
    assert not sample.logprobs.any()


def test_no_logprobs_unless_asked(server: Server) -> None:
    (sample,) = server.wire.generate(PROMPT, max_tokens=4, seed=1)
    assert sample.top_ids is None and sample.chosen is None and len(sample.logprobs) == 0


def test_score_orders_adapters_and_names_versions(server: Server) -> None:
    sequences = [PROMPT, PROMPT[::-1], [9]]
    response = server.wire.score_response(sequences, ["a", "", "b@1", "a"])
    assert [(item.adapter, item.version) for item in response.versions] == [
        ("a", 1),
        ("", 0),
        ("b", 1),
        ("a", 1),
    ]
    assert response.versions[0].digest == server.wire.adapter("a").digest
    rows = server.wire.score(sequences, ["a", "", "b@1", "a"])
    for row in rows:
        assert np.array_equal(row[0].logprobs, row[3].logprobs, equal_nan=True)
    assert not np.array_equal(rows[0][0].logprobs[1:], rows[0][1].logprobs[1:])
    assert np.isnan(rows[2][0].logprobs).tolist() == [True]


def test_score_of_no_adapters_is_the_base_model(server: Server) -> None:
    ((implied,),) = server.wire.score([PROMPT])
    ((named,),) = server.wire.score([PROMPT], [""])
    assert implied.logprobs.tobytes() == named.logprobs.tobytes()


def test_score_temperature_divides_logits(server: Server) -> None:
    ((raw,),) = server.wire.score([PROMPT], chosen=VOCABULARY)
    ((warm,),) = server.wire.score([PROMPT], chosen=VOCABULARY, temperature=2.0)
    scaled = raw.chosen[1:].astype(np.float64) / 2
    expected = scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))
    assert np.abs(warm.chosen[1:] - expected).max() < 1e-5


# --- Adapters named by requests.


def test_spans_name_the_version_of_every_token(server: Server) -> None:
    for adapter, expected in [("a", ("a", 1)), ("b@1", ("b", 1)), ("", ("", 0))]:
        (sample,) = server.wire.generate(PROMPT, adapter=adapter, max_tokens=9, ignore_eos=True)
        digest = server.wire.adapter(adapter).digest if adapter else ""
        assert sample.spans == [(*expected, digest, 0, 9)]


def test_adapters_change_the_answer(server: Server) -> None:
    answers = {tuple(greedy(server, 20, adapter=name)) for name in ("", "a", "b")}
    assert len(answers) == 3


# --- Non-finite logits.


def test_non_finite_logits_end_the_sample_only(zoo, tmp_path) -> None:
    """Finite weights whose product overflows: magnitudes of 3e38 on the head."""
    import shutil

    from safetensors.torch import load_file, save_file

    folder = tmp_path / "overflow"
    shutil.copytree(zoo.adapter("llama2", "dora_head"), folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    key = "base_model.model.lm_head.lora_magnitude_vector"
    tensors[key] = tensors[key] * 0 + 3e38
    save_file(tensors, folder / "adapter_model.safetensors")
    with serve(zoo.model("llama2"), {"overflow": folder}) as server:
        calls = server.wire.generate_many(
            [
                dict(prompt=PROMPT, adapter="overflow", max_tokens=5),
                dict(prompt=PROMPT, max_tokens=5, ignore_eos=True),
            ]
        )
        assert calls[0][0].reason == NON_FINITE and calls[0][0].tokens == []
        assert calls[0][0].finish.detail
        assert calls[1][0].reason == LENGTH and len(calls[1][0].tokens) == 5
        with pytest.raises(grpc.RpcError) as caught:
            server.wire.score([PROMPT], ["overflow"])
        assert failure(caught.value).reason == "LOGITS_NOT_FINITE"
        wait_until(lambda: is_idle(server), what="an idle engine")
