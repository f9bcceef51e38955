"""Requests with the same prompt that arrive together: it is computed once, and the answers are
those of requests alone."""

import numpy as np
import pytest
from lib.server import serve
from lib.tiny_models import VOCAB
from lib.wire import RAW

EACH = 8
TOKENS = 12


def prompts(count: int) -> list[list[int]]:
    """Of 60 to 170 tokens."""
    rng = np.random.default_rng(1)
    return [rng.integers(6, VOCAB, rng.integers(60, 171)).tolist() for _ in range(count)]


def requests(count: int, order: str) -> list[dict]:
    """Each prompt `EACH` times: one after the other, or in rounds."""
    made = prompts(count)
    if order == "one after the other":
        repeated = [prompt for prompt in made for _ in range(EACH)]
    else:
        repeated = made * EACH
    return [
        dict(
            prompt=prompt,
            adapter=("", "dora")[len(prompt) % 2],
            seed=seed,
            max_tokens=TOKENS,
            ignore_eos=True,
            logprobs=RAW,
        )
        for seed, prompt in enumerate(repeated)
    ]


def run(server, wanted: list[dict], **options) -> tuple[list, float]:
    """The answers, and how many prompt tokens were computed."""
    before = server.metric("dorad_prompt_tokens_total", source="computed")
    answers = server.wire.generate_many([{**request, **options} for request in wanted])
    computed = server.metric("dorad_prompt_tokens_total", source="computed") - before
    return [(samples[0].tokens, samples[0].logprobs.tobytes()) for samples in answers], computed


@pytest.mark.parametrize("count", [16, pytest.param(128, marks=pytest.mark.deep)])
@pytest.mark.parametrize("order", ["one after the other", "in rounds"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"engine.max_step_tokens": 96},  # prompts in several chunks
        {"engine.max_running_sequences": 24},
    ],
    ids=["", "chunks", "few places"],
)
def test_repeated_prompts_are_computed_once(zoo, figures, count, order, settings) -> None:
    wanted = requests(count, order)
    distinct = sum(len(prompt) for prompt in prompts(count))
    adapters = {"dora": zoo.adapter("llama2", "dora")}
    common = {"engine.kv_bytes": 256 << 20, "engine.max_running_sequences": 256}
    with serve(zoo.model("llama2"), adapters, {**common, **settings}) as server:
        answers, computed = run(server, wanted)
        alone, _ = run(server, wanted, bypass=True)
    assert answers == alone
    # A prompt that comes when no request computes it needs its last row again, and no other one.
    assert distinct <= computed <= distinct + len(wanted) - count
    figures.append(
        f"{len(wanted)} requests of {count} prompts, {order}: {computed / distinct:.3f} of the"
        " distinct prompt tokens computed"
    )


def test_a_prompt_that_fills_the_cache_is_answered_again(zoo) -> None:
    """There is no page for a copy of its last tokens: they are computed again."""
    with serve(zoo.model("llama2"), None, {"engine.kv_bytes": 160 << 10}) as server:
        length = server.wire.info().model.context_length
        assert length % 16 == 0 and length < 192, "the cache has room for one whole context"
        options = dict(max_tokens=1, temperature=0.0, logprobs=RAW)
        for tokens in [length - 1, length - 9]:
            prompt = [6 + i % 250 for i in range(tokens)]
            answers = [server.wire.generate(prompt, **options)[0] for _ in range(2)]
            assert answers[0].tokens == answers[1].tokens
            assert answers[0].logprobs == answers[1].logprobs
            cached = answers[1].finish.usage.cached_prompt_tokens
            assert cached == (tokens - 1) // 16 * 16
