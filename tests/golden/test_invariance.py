"""A request's tokens and log-probabilities depend on the request alone: not on what else is in the
batch, nor on how the server came to compute them."""

import functools
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from lib import tiny_models
from lib.server import Server, device, serve
from lib.wire import FINAL, RAW, STREAM, Sample, Score

KINDS = ["dora", "dora_r96", "lora", "dora_everything"]
ADAPTERS = ["", "dora", "dora-r96", "lora", "dora-everything"]
# Enough that a few sequences outgrow the pages that test_preempted_equals_alone leaves them.
NEW_TOKENS = 40
# The quick tier has gemma3_text and qwen35_text in bf16 alone. Their own operations do not depend
# on the dtype of products, and the products in fp32 are the same in all families.
SETUPS = [
    ("llama2", "fp32"),
    ("qwen2_window", "fp32"),
    pytest.param(("gemma3_text", "fp32"), marks=pytest.mark.deep),
    pytest.param(("qwen35_text", "fp32"), marks=pytest.mark.deep),
    ("llama3", "bf16"),
    ("qwen3", "bf16"),
    ("gemma3_text", "bf16"),
    ("qwen35_text", "bf16"),
    ("qwen3", "fp8"),  # of the KV cache, beside bf16
]


def requests() -> list[dict]:
    """16 requests over 4 adapters and base: greedy and sampled, short and long prompts."""
    rng = np.random.default_rng(5)
    choices = np.random.default_rng(6)
    result = []
    for index in range(16):
        prompt = rng.integers(6, tiny_models.VOCAB, size=[3, 18, 33, 47][index % 4]).tolist()
        greedy = index % 3 == 0
        result.append(
            dict(
                prompt=prompt,
                adapter=ADAPTERS[index % len(ADAPTERS)],
                temperature=0.0 if greedy else 0.9,
                top_p=None if greedy else 0.95,
                seed=100 + index,
                max_tokens=NEW_TOKENS,
                ignore_eos=True,
                logprobs=RAW,
                top_logprobs=3,
                bypass=True,
            )
            | logit_params(index, choices)
        )
    return result


def logit_params(index: int, rng: np.random.Generator) -> dict:
    """Changes of logits that depend on the sequence so far, for half of the requests."""
    if index % 4 == 1:
        # Few tokens, so that they repeat and meet in many of the bad words.
        allowed = rng.choice(np.arange(6, tiny_models.VOCAB), size=40, replace=False)
        pairs = rng.choice(allowed, size=(200, 2)).tolist()
        triples = rng.choice(allowed, size=(400, 3)).tolist()
        return dict(
            allowed=allowed.tolist(),
            bad_words=[*pairs, *triples, [int(allowed[0])]],
            frequency_penalty=0.4,
        )
    if index % 4 == 3:
        biased = rng.integers(6, tiny_models.VOCAB, size=8).tolist()
        return dict(
            presence_penalty=0.6,
            frequency_penalty=-0.2,
            repetition_penalty=1.3,
            logit_bias=dict.fromkeys(biased, 3.0),
        )
    return {}


def bits(sample: Sample) -> tuple:
    """Everything that must be equal to the last bit."""
    return (
        sample.tokens,
        sample.logprobs.tobytes(),
        sample.top_ids.tobytes(),
        sample.top_logprobs.tobytes(),
    )


@dataclass
class Setup:
    model: Path
    settings: dict
    server: Server
    # Each request run alone.
    alone: list[tuple]
    alone_steps: int
    # A server of the same model with other settings; the same one for the same ones.
    another: Callable[..., Server]


def steps(server: Server) -> int:
    return server.wire.info().engine.steps


def preemptions(server: Server) -> float:
    return server.metric("dorad_engine_preemptions_total")


def until_preempted(setup: Setup, server: Server, run: Callable[[], list[Sample]]) -> list[Sample]:
    """The last samples of `run`. Where a busy machine keeps sequences apart, it runs again.

    Windows leave room for these short contexts: test_windows.py has longer ones.
    """
    for _ in range(8):
        samples = run()
        if preemptions(server) > 0 or config_of(setup).get("sliding_window"):
            return samples
    raise AssertionError("no sequence was preempted")


@pytest.fixture(scope="module", params=SETUPS, ids="-".join)
def setup(request, zoo):
    family, compute = request.param
    if device() == "cuda" and compute == "fp32":
        pytest.skip("a GPU computes in bf16")
    if device() == "cpu" and compute == "fp8":
        pytest.skip("needs a GPU")
    folders = {kind.replace("_", "-"): zoo.adapter(family, kind) for kind in KINDS}
    settings = {
        "model.compute_dtype": "bf16" if compute == "fp8" else compute,
        "engine.kv_dtype": "fp8" if compute == "fp8" else "auto",
        "engine.deterministic": True,
        "engine.kv_bytes": 16 << 20,
    }
    with ExitStack() as others, serve(zoo.model(family), folders, settings) as server:

        @functools.cache
        def another(**changes: object) -> Server:
            return others.enter_context(serve(zoo.model(family), folders, settings | changes))

        assert server.wire.info().engine.kv_dtype == compute
        before = steps(server)
        alone = [bits(server.wire.generate(**request)[0]) for request in requests()]
        taken = steps(server) - before
        yield Setup(zoo.model(family), settings, server, alone, taken, another)


def run_batch(server: Server, **changes) -> list[Sample]:
    return [samples[0] for samples in server.wire.generate_many([r | changes for r in requests()])]


def config_of(setup: Setup) -> dict:
    return json.loads((setup.model / "config.json").read_text())


def few_pages(setup: Setup) -> int:
    """Bytes of 14 blocks, which a few sequences outgrow; of 7 if layers have windows, whose pages
    are soon free again; or of 10 and states for three of them."""
    config = config_of(setup)
    heads = config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    layers = config["num_hidden_layers"]
    if setup.settings["engine.kv_dtype"] == "fp8":  # and factors; idle planes from 16 planes on
        planes = 2 * layers + -(-layers // (head_dim // 4))
        return 14 * planes * heads * head_dim * 16
    size = 2 if setup.settings["model.compute_dtype"] == "bf16" else 4
    block = heads * head_dim * 16 * size
    if "linear_num_value_heads" not in config:
        return (7 if config.get("sliding_window") else 14) * 2 * layers * block
    nets = config["layer_types"].count("linear_attention")
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    rows = (config["linear_conv_kernel_dim"] - 1) * (2 * keys + values)
    element = 2 if device() == "cuda" else 4
    # Of a state: its heads, and the convolution's rows.
    blocks = config["linear_num_value_heads"] + -(-rows * element // block)
    state = -(-nets * blocks // (2 * (layers - nets)))
    return (10 + 3 * state) * 2 * (layers - nets) * block


def test_requests_are_sampled_and_differ(setup: Setup) -> None:
    """Guards the other tests: sixteen equal or constant answers would prove nothing."""
    assert len({tuple(tokens) for tokens, *_ in setup.alone}) == 16
    sampled = [
        tokens
        for request, (tokens, *_) in zip(requests(), setup.alone, strict=True)
        if request["temperature"] > 0
    ]
    assert all(len(set(tokens)) > 5 for tokens in sampled)


def test_mixed_batch_equals_alone(setup: Setup) -> None:
    before = steps(setup.server)
    samples = run_batch(setup.server)
    assert steps(setup.server) - before < setup.alone_steps / 2, "the requests were not batched"
    assert [bits(sample) for sample in samples] == setup.alone


def test_streamed_equals_final(setup: Setup) -> None:
    streamed = run_batch(setup.server, mode=STREAM)
    assert [bits(sample) for sample in streamed] == setup.alone
    final = run_batch(setup.server, mode=FINAL)
    assert all(sample.messages == 1 for sample in final)
    assert any(sample.messages > 1 for sample in streamed)


def test_chunked_prefill_equals_whole(setup: Setup) -> None:
    server = setup.another(**{"engine.max_step_tokens": 7})
    before = steps(server)
    first = requests()[3]
    assert len(first["prompt"]) > 40
    (sample,) = server.wire.generate(**first)
    assert steps(server) - before >= NEW_TOKENS + 40 // 7, "the prompt was not chunked"
    assert bits(sample) == setup.alone[3]
    assert [bits(sample) for sample in run_batch(server)] == setup.alone


def test_prefix_hit_equals_miss(setup: Setup) -> None:
    for _ in range(2):
        samples = run_batch(setup.server, bypass=False, salt="prefix")
        assert [bits(sample) for sample in samples] == setup.alone
    for request, sample in zip(requests(), samples, strict=True):
        cached = sample.finish.usage.cached_prompt_tokens
        assert cached >= (len(request["prompt"]) - 1) // 16 * 16, "the prefix cache was not used"


def test_preempted_equals_alone(setup: Setup) -> None:
    """Room for one full context and little more: most of the sixteen must wait or be preempted."""
    settings = {"engine.kv_bytes": few_pages(setup), "engine.prefix_cache": False}
    server = setup.another(**settings)
    samples = until_preempted(setup, server, lambda: run_batch(server))
    preempted = sum(sample.finish.usage.preemptions for sample in samples)
    assert preempted == preemptions(server)
    assert [bits(sample) for sample in samples] == setup.alone


def guesses(setup: Setup, kind: str) -> list[dict]:
    """Drafts for each request: its answer, the answer with some tokens replaced, lost or added, or
    tokens that have nothing to do with it."""
    rng = np.random.default_rng(8)
    drafts = []
    for tokens, *_ in setup.alone:
        guess = list(tokens)
        if kind == "close":
            guess[4] = int(rng.integers(6, tiny_models.VOCAB))
            del guess[12:14]
            guess[20:20] = rng.integers(6, tiny_models.VOCAB, size=int(rng.integers(1, 4))).tolist()
        elif kind == "hostile":
            guess = rng.integers(0, tiny_models.VOCAB, size=3 * NEW_TOKENS).tolist()
            guess[0] = tokens[0]
        drafts.append(dict(drafts=[guess], ngram_drafts=kind == "hostile"))
    return drafts


def run_drafted(server: Server, setup: Setup, kind: str, **changes) -> list[Sample]:
    drafts = guesses(setup, kind)
    together = [r | changes | d for r, d in zip(requests(), drafts, strict=True)]
    return [samples[0] for samples in server.wire.generate_many(together)]


@pytest.mark.parametrize("kind", ["right", "close", "hostile"])
def test_drafts_leave_no_trace(setup: Setup, kind: str) -> None:
    ways = [
        run_drafted(setup.server, setup, kind),
        run_drafted(setup.server, setup, kind, mode=STREAM),
        *(run_drafted(setup.server, setup, kind, bypass=False, salt=kind) for _ in range(2)),
    ]
    before = steps(setup.server)
    together = zip(requests(), guesses(setup, kind), strict=True)
    ways.append([setup.server.wire.generate(**r | draft)[0] for r, draft in together])
    taken = steps(setup.server) - before
    # Chunks of prompts and drafts, and sequences that lose their pages.
    settings = {"engine.kv_bytes": few_pages(setup), "engine.max_step_tokens": 24}
    server = setup.another(**settings)
    # Of all kinds so far: drafts that are taken leave sequences little time to meet.
    ways.append(until_preempted(setup, server, lambda: run_drafted(server, setup, kind)))
    for samples in ways:
        assert [bits(sample) for sample in samples] == setup.alone
    accepted = [s.finish.usage.accepted_draft_tokens for samples in ways for s in samples]
    if "qwen35" in setup.model.name:
        assert sum(accepted) == 0, "a recurrence takes no drafts"
    elif kind == "right":
        # In company a step may have no room for the drafts of some.
        assert min(accepted[: 5 * 16]) > NEW_TOKENS / 4 and taken < setup.alone_steps / 3
        assert sum(accepted) > 6 * 16 * NEW_TOKENS / 2
    elif kind == "close":
        assert sum(accepted) > 4 * 16 * NEW_TOKENS / 4


def test_thread_count_changes_nothing(setup: Setup) -> None:
    server = setup.another(**{"engine.threads": 1})
    assert [bits(sample) for sample in run_batch(server)] == setup.alone


def test_samples_of_one_prompt_equal_single_requests(setup: Setup) -> None:
    """Sample 0 of n draws as the only sample does; all samples are the same in any company."""
    request = requests()[7] | {"bypass": False, "salt": "n"}
    together = setup.server.wire.generate(**request, n=4)
    assert bits(together[0]) == setup.alone[7]
    assert len({tuple(sample.tokens) for sample in together}) == 4
    cached = [sample.finish.usage.cached_prompt_tokens for sample in together]
    assert sum(count > 0 for count in cached) >= 3, "the samples did not share their prompt"
    crowd = setup.server.wire.generate_many([request | {"n": 4}, *requests()])
    assert [bits(sample) for sample in crowd[0]] == [bits(sample) for sample in together]
    assert [bits(samples[0]) for samples in crowd[1:]] == setup.alone


def test_decode_logprobs_equal_score(setup: Setup) -> None:
    for request, (tokens, logprobs, _, top_logprobs) in zip(requests(), setup.alone, strict=True):
        ids = request["prompt"] + tokens
        ((score,),) = setup.server.wire.score([ids], [request["adapter"]], top_k=3)
        begin = len(request["prompt"])
        assert score.logprobs[begin:].tobytes() == logprobs
        assert score.top_logprobs[begin:].tobytes() == top_logprobs


def score_bits(score: Score) -> tuple:
    arrays = (score.logprobs, score.top_ids, score.top_logprobs, score.chosen)
    return tuple(array.tobytes() for array in arrays)


CHOSEN = [7, 11, 200]


def expected_prompts(setup: Setup) -> list[tuple]:
    """What Score says about each request's prompt."""
    scores = [
        setup.server.wire.score([r["prompt"]], [r["adapter"]], top_k=3, chosen=CHOSEN)[0][0]
        for r in requests()
    ]
    return [score_bits(score) for score in scores]


def assert_prompts_scored(samples: list[Sample], setup: Setup) -> None:
    assert [score_bits(sample.prompt) for sample in samples] == expected_prompts(setup)
    assert [bits(sample) for sample in samples] == setup.alone


@pytest.mark.parametrize("mode", [FINAL, STREAM])
def test_prompt_logprobs_equal_score(setup: Setup, mode: int) -> None:
    wanted = dict(prompt_logprobs=True, chosen=CHOSEN, mode=mode)
    alone = [setup.server.wire.generate(**request | wanted)[0] for request in requests()]
    assert_prompts_scored(alone, setup)
    assert_prompts_scored(run_batch(setup.server, **wanted), setup)
    # With the prefix cache: filled, then present.
    for _ in range(2):
        cached = run_batch(setup.server, **wanted, bypass=False, salt="scored")
        assert_prompts_scored(cached, setup)
        assert all(sample.finish.usage.cached_prompt_tokens == 0 for sample in cached)
    plain = run_batch(setup.server, bypass=False, salt="scored")
    assert [bits(sample) for sample in plain] == setup.alone
    assert sum(sample.finish.usage.cached_prompt_tokens > 0 for sample in plain) >= 8


def test_prompt_logprobs_in_chunks_and_preempted_equal_score(setup: Setup) -> None:
    wanted = dict(prompt_logprobs=True, chosen=CHOSEN)
    server = setup.another(**{"engine.max_step_tokens": 7})
    assert_prompts_scored(run_batch(server, **wanted), setup)
    server = setup.another(**{"engine.kv_bytes": few_pages(setup), "engine.max_step_tokens": 9})
    samples = until_preempted(setup, server, lambda: run_batch(server, **wanted))
    assert_prompts_scored(samples, setup)


def test_prompt_logprobs_come_once_for_several_samples(setup: Setup) -> None:
    request = requests()[7] | dict(prompt_logprobs=True, chosen=CHOSEN, bypass=False, salt="once")
    together = setup.server.wire.generate(**request, n=4)
    assert score_bits(together[0].prompt) == expected_prompts(setup)[7]
    assert all(sample.prompt is None for sample in together[1:])
    assert bits(together[0]) == setup.alone[7]
    plain = setup.server.wire.generate(**requests()[7], n=4)
    assert [bits(sample) for sample in together] == [bits(sample) for sample in plain]


def test_stop_sequences_end_every_sample_at_the_same_token(setup: Setup) -> None:
    """Each request ends at its own sequence: tokens 17 to 20 of its run alone."""
    ends = [tokens[17:20] for tokens, *_ in setup.alone]
    first = [
        next(e for e in range(3, NEW_TOKENS + 1) if tokens[e - 3 : e] == end)
        for (tokens, *_), end in zip(setup.alone, ends, strict=True)
    ]
    stopping = [
        request | dict(stop_sequences=[[5, 6, 7, 8], end])
        for request, end in zip(requests(), ends, strict=True)
    ]

    def assert_stopped(samples: list[Sample]) -> None:
        for sample, (tokens, logprobs, *_), count in zip(samples, setup.alone, first, strict=True):
            assert sample.tokens == tokens[:count]
            assert sample.logprobs.tobytes() == logprobs[: 4 * count]
            assert sample.finish.stop_sequence == 1

    assert_stopped([setup.server.wire.generate(**request)[0] for request in stopping])
    streamed = [request | dict(mode=STREAM) for request in stopping]
    assert_stopped([samples[0] for samples in setup.server.wire.generate_many(streamed)])
    server = setup.another(**{"engine.kv_bytes": few_pages(setup)})
    assert_stopped([samples[0] for samples in server.wire.generate_many(stopping)])


def test_a_truncated_prompt_equals_its_end(setup: Setup) -> None:
    wanted = dict(prompt_logprobs=True, chosen=CHOSEN)
    for request, end in zip(requests(), expected_prompts(setup), strict=True):
        longer = request | dict(prompt=[9, 8, 7] * 99 + request["prompt"])
        (sample,) = setup.server.wire.generate(**longer, **wanted, truncate=len(request["prompt"]))
        assert score_bits(sample.prompt) == end
        assert sample.finish.usage.prompt_tokens == len(request["prompt"])
    assert bits(sample) == setup.alone[-1]


def test_score_does_not_depend_on_its_batch(setup: Setup) -> None:
    sequences = [request["prompt"] for request in requests()[1:9]]
    together = setup.server.wire.score(sequences, ADAPTERS)
    for ids, row in zip(sequences, together, strict=True):
        for adapter, score in zip(ADAPTERS, row, strict=True):
            ((alone,),) = setup.server.wire.score([ids], [adapter])
            assert alone.logprobs.tobytes() == score.logprobs.tobytes()


@pytest.mark.parametrize("family", ["llama2", "qwen2_window"])
def test_without_deterministic_greedy_tokens_stay_equal(zoo, family: str) -> None:
    folders = {kind.replace("_", "-"): zoo.adapter(family, kind) for kind in KINDS}
    settings = {"engine.deterministic": False, "engine.kv_bytes": 16 << 20}
    greedy = [request | {"temperature": 0.0, "top_p": None} for request in requests()]
    with serve(zoo.model(family), folders, settings) as server:
        alone = [server.wire.generate(**request)[0] for request in greedy]
        together = [samples[0] for samples in server.wire.generate_many(greedy)]
    for one, other in zip(alone, together, strict=True):
        assert one.tokens == other.tokens
        assert np.abs(one.logprobs - other.logprobs).max() <= 1e-5
