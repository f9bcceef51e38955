"""Prompts with images against transformers + PEFT in fp32: full-vocabulary log-probabilities of
Generate and Score, and the same bits however the prompt is computed."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dorad import Client, GenerateRequest
from lib.oracle import compare
from lib.pictures import FAMILIES, Picture, for_oracle, inputs_of, prompt_of
from lib.server import device, serve
from lib.tiny_models import IMAGE, VIDEO
from lib.zoo import Zoo

EXACT = device() == "cpu"  # a GPU computes in bf16
ADAPTERS = [
    "dora",
    "dora_everything",
    "dora_tower",
    "rslora_tower",
    "dora_tower_layers",
    "dora_tower_patterns",
]
PROMPTS = {
    "none": [5, 6, 7],
    "one": [5, Picture(1, 4, 4), 6, 7],
    "wide": [Picture(2, 2, 10), 9],
    "several": [5, Picture(3, 4, 6), 8, Picture(4, 6, 2), Picture(5, 2, 2), 11, 12],
    "second_turn": [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, Picture(6, 8, 8), 18],
    "long": [*range(20, 60), Picture(7, 12, 10), *range(60, 90)],
}
LARGE = [5, 6, Picture(8, 48, 46), 7]
TOKENS = 6
# transformers fails on one without its image.
PLACEHOLDERS = [[IMAGE], [VIDEO]]


@dataclass(frozen=True)
class Served:
    zoo: Zoo
    family: str
    model: Path
    adapters: dict[str, Path]
    client: Client

    def inputs(self, parts):
        return inputs_of(self.family, parts)

    def vocabulary(self):
        return self.client.info().model.vocab_size

    def rows(self, ids, images, adapter):
        """[T, V] of Score: row t is the distribution of the token after t."""
        chosen = list(range(self.vocabulary()))
        result = self.client.score([ids], [adapter], chosen_token_ids=chosen, images=[images])
        return result.chosen_logprobs[0][0]

    def expected(self, inputs, adapter, tokens=(), dtype="float32"):
        """The oracle's rows but for the last, whose token is not there."""
        seen = for_oracle(inputs, list(tokens))
        return self.zoo.image_logprobs(self.family, adapter or "base", seen, dtype)[:-1]


@pytest.fixture(scope="module", params=FAMILIES)
def served(zoo, request):
    family, model = request.param, zoo.model(request.param)
    adapters = {name: zoo.adapter(family, name) for name in ADAPTERS}
    with serve(model, adapters) as server, Client(server.grpc) as client:
        yield Served(zoo, family, model, adapters, client)


@pytest.fixture(scope="module")
def in_bf16(served):
    """A client of a server that computes in bf16."""
    settings = {"model.compute_dtype": "bf16"}
    with (
        serve(served.model, served.adapters, settings=settings) as server,
        Client(server.grpc) as client,
    ):
        yield client


@pytest.mark.parametrize("adapter", [None, *ADAPTERS])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_log_probabilities_are_those_of_transformers(served, adapter, prompt):
    inputs = served.inputs(PROMPTS[prompt])
    ids, images = prompt_of(inputs)
    (sample,) = served.client.generate(
        ids,
        images=images,
        adapter=adapter,
        max_tokens=TOKENS,
        ignore_eos=True,
        seed=3,
        bad_words=PLACEHOLDERS,
        chosen_token_ids=list(range(served.vocabulary())),
    )
    tokens = [int(t) for t in sample.token_ids]
    scored = served.rows(ids + tokens, images, adapter)[1:]
    assert np.array_equal(scored[len(ids) - 1 :], sample.chosen_logprobs)
    expected = served.expected(inputs, adapter, tokens)
    cosine, difference = compare(scored, expected)
    least, most = (0.999999, 1e-4) if EXACT else (0.999, 1.0)
    assert cosine > least and difference < most, (cosine, difference)


@pytest.mark.parametrize("adapter", [None, "dora", "dora_tower", "dora_tower_patterns"])
def test_bf16_is_no_farther_from_fp32_than_that_of_peft(served, in_bf16, adapter, figures):
    errors = []  # Each row counts once: the first ones of a delta-net enlarge rounding.
    for name in ["one", "several", "long"]:
        inputs = served.inputs(PROMPTS[name])
        ids, images = prompt_of(inputs)
        exact = served.expected(inputs, adapter)
        theirs = served.expected(inputs, adapter, dtype="bfloat16")
        ours = replace(served, client=in_bf16).rows(ids, images, adapter)[1:]
        errors.append([np.abs(rows - exact).mean(axis=-1) for rows in (ours, theirs)])
    ours, theirs = np.concatenate(errors, axis=-1).mean(axis=-1)
    figures.append(f"{served.family} {adapter}: mean |Δ| {ours:.4f}, PEFT's in bf16 {theirs:.4f}")
    assert ours < theirs


@pytest.mark.parametrize("served", ["qwen3_vl"], indirect=True)  # its context is long enough
def test_a_large_image_is_computed_in_pieces(served):
    for adapter in [None, "dora_tower"]:
        inputs = served.inputs(LARGE)
        ids, images = prompt_of(inputs)
        ours = served.rows(ids, images, adapter)[1:]
        cosine, difference = compare(ours, served.expected(inputs, adapter))
        least, most = (0.999999, 1e-4) if EXACT else (0.999, 1.0)
        assert cosine > least and difference < most, (cosine, difference)


def test_an_image_changes_the_answer_and_so_does_the_adapter_of_the_tower(served):
    def rows(seed, adapter):
        ids, images = prompt_of(served.inputs([5, Picture(seed, 4, 4), 6]))
        return served.rows(ids, images, adapter)[-1]

    assert np.abs(rows(1, None) - rows(2, None)).max() > 1e-3
    assert np.abs(rows(1, "dora_tower") - rows(1, None)).max() > 1e-3


def test_bf16_pixels_are_their_value(served):
    inputs = served.inputs([5, Picture(1, 4, 4, torch.bfloat16), 6])
    ids, images = prompt_of(inputs)
    ours = served.rows(ids, images, None)
    inputs["pixel_values"] = inputs["pixel_values"].float()
    if not EXACT:  # which rounds fp32 pixels
        ids, images = prompt_of(inputs)
        assert np.array_equal(ours[1:], served.rows(ids, images, None)[1:])
        return
    assert compare(ours[1:], served.expected(inputs, None))[1] < 1e-4


@pytest.mark.parametrize(
    "settings",
    [
        {"engine.max_step_tokens": "few"},
        {"engine.prefix_cache": "false"},
        {"engine.kv_bytes": "1MiB"},
        {"engine.image_cache_bytes": 0},
        {"engine.threads": 2},
    ],
    ids=str,
)
def test_bits_do_not_depend_on_chunks_pages_caches_and_neighbours(served, settings):
    if settings.get("engine.max_step_tokens") == "few":  # one image of Gemma's, and little else
        settings = {"engine.max_step_tokens": 18 if served.family == "gemma3" else 7}
    names = [None, "dora", "dora_tower"]
    prompts = [prompt_of(served.inputs(PROMPTS[name])) for name in PROMPTS]
    options = {"max_tokens": 8, "ignore_eos": True, "seed": 4, "logprobs": "raw", "n": 2}
    alone = [
        served.client.generate(ids, images=images, adapter=name, **options)
        for ids, images in prompts
        for name in names
    ]
    with (
        serve(served.model, served.adapters, settings=settings) as other,
        Client(other.grpc) as c,
    ):
        together = c.generate_many(
            [
                GenerateRequest(ids, images=images, adapter=name, **options)
                for ids, images in prompts
                for name in names
            ]
        )
    for one, other_one in zip(alone, together, strict=True):
        for a, b in zip(one, other_one, strict=True):
            assert np.array_equal(a.token_ids, b.token_ids)
            assert np.array_equal(a.logprobs, b.logprobs)
