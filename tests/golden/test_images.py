"""Prompts with images against transformers + PEFT in fp32: full-vocabulary log-probabilities of
Generate and Score, and the same bits however the prompt is computed."""

import numpy as np
import pytest
import torch
from dorad import Client, GenerateRequest
from lib.oracle import compare
from lib.pictures import for_oracle, inputs_of, picture, prompt_of
from lib.server import device, serve
from lib.tiny_models import IMAGE, VIDEO

pytestmark = pytest.mark.skipif(device() != "cpu", reason="GPUs serve no images yet")

FAMILIES = ["qwen3_vl", "qwen25_vl"]
ADAPTERS = ["dora", "dora_everything", "dora_tower", "rslora_tower", "dora_tower_patterns"]
PROMPTS = {
    "none": [5, 6, 7],
    "one": [5, picture(1, 4, 4), 6, 7],
    "wide": [picture(2, 2, 10), 9],
    "several": [5, picture(3, 4, 6), 8, picture(4, 6, 2), picture(5, 2, 2), 11, 12],
    "second_turn": [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, picture(6, 8, 8), 18],
    "long": [*range(20, 60), picture(7, 12, 10), *range(60, 90)],
}
TOKENS = 6
# transformers fails on one without its image.
PLACEHOLDERS = [[IMAGE], [VIDEO]]


@pytest.fixture(scope="module", params=FAMILIES)
def server(zoo, request):
    family = request.param
    adapters = {name: zoo.adapter(family, name) for name in ADAPTERS}
    with serve(zoo.model(family), adapters) as server, Client(server.grpc) as client:
        yield client, zoo.oracle(family), adapters, zoo.model(family)


def rows_of(client, ids, images, adapter, vocabulary):
    """[T, V] of Score: row t is the distribution of the token after t."""
    result = client.score(
        [ids], [adapter], chosen_token_ids=list(range(vocabulary)), images=[images]
    )
    return result.chosen_logprobs[0][0]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("adapter", [None, *ADAPTERS])
def test_log_probabilities_are_those_of_transformers(server, adapter, prompt):
    client, oracle, adapters, _ = server
    inputs = inputs_of(PROMPTS[prompt])
    ids, images = prompt_of(inputs)
    vocabulary = client.info().model.vocab_size
    chosen = list(range(vocabulary))
    (sample,) = client.generate(
        ids,
        images=images,
        adapter=adapter,
        max_tokens=TOKENS,
        ignore_eos=True,
        seed=3,
        bad_words=PLACEHOLDERS,
        chosen_token_ids=chosen,
    )
    tokens = [int(t) for t in sample.token_ids]
    folder = None if adapter is None else adapters[adapter]
    expected = oracle.image_logprobs(folder, for_oracle(inputs, tokens))
    generated = expected[len(ids) - 1 : len(ids) - 1 + TOKENS]
    cosine, difference = compare(sample.chosen_logprobs, generated)
    assert cosine > 0.999999 and difference < 1e-4, (cosine, difference)
    scored = rows_of(client, ids + tokens, images, adapter, vocabulary)
    cosine, difference = compare(scored[1:], expected[:-1])
    assert cosine > 0.999999 and difference < 1e-4, (cosine, difference)
    assert np.array_equal(scored[len(ids) :], sample.chosen_logprobs)


def test_an_image_changes_the_answer_and_so_does_the_adapter_of_the_tower(server):
    client, _, _, _ = server
    vocabulary = client.info().model.vocab_size

    def rows(seed, adapter):
        ids, images = prompt_of(inputs_of([5, picture(seed, 4, 4), 6]))
        return rows_of(client, ids, images, adapter, vocabulary)[-1]

    assert np.abs(rows(1, None) - rows(2, None)).max() > 1e-3
    assert np.abs(rows(1, "dora_tower") - rows(1, None)).max() > 1e-3


def test_bf16_pixels_are_their_value(server):
    client, oracle, _, _ = server
    inputs = inputs_of([5, picture(1, 4, 4, torch.bfloat16), 6])
    ids, images = prompt_of(inputs)
    ours = rows_of(client, ids, images, None, client.info().model.vocab_size)
    inputs["pixel_values"] = inputs["pixel_values"].float()
    expected = oracle.image_logprobs(None, for_oracle(inputs, []))
    assert compare(ours[1:], expected[:-1])[1] < 1e-4


@pytest.mark.parametrize(
    "settings",
    [
        {"engine.max_step_tokens": 7},
        {"engine.prefix_cache": "false"},
        {"engine.kv_bytes": "1MiB"},
        {"engine.image_cache_bytes": 0},
        {"engine.threads": 2},
    ],
    ids=str,
)
def test_bits_do_not_depend_on_chunks_pages_caches_and_neighbours(server, settings):
    client, _, adapters, model = server
    names = [None, "dora", "dora_tower"]
    prompts = [prompt_of(inputs_of(PROMPTS[name])) for name in PROMPTS]
    options = {"max_tokens": 8, "ignore_eos": True, "seed": 4, "logprobs": "raw", "n": 2}
    alone = [
        client.generate(ids, images=images, adapter=name, **options)
        for ids, images in prompts
        for name in names
    ]
    with serve(model, adapters, settings=settings) as other, Client(other.grpc) as c:
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
