"""Images of Gemma 3: their rows see each other, so a step computes all rows of an image or none."""

import json
import re
import shutil

import numpy as np
import pytest
from dorad import Client, DoradError, Image
from lib.adapters import WEIGHTS
from lib.pictures import SIDE, Picture, for_oracle, inputs_of, prompt_of
from lib.server import device, serve
from lib.tiny_models import IMAGE
from safetensors.torch import load_file, save_file

TOKENS = 16  # of an image
TOWER = r"vision_tower\."
OLDER = "vision_tower.vision_model."


def prompt(parts):
    return prompt_of(inputs_of("gemma3", parts))


def rename(path, pattern, name):
    tensors = {re.sub(pattern, name, key): value for key, value in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def client(zoo):
    adapters = {name: zoo.adapter("gemma3", name) for name in ["dora", "dora_tower"]}
    with serve(zoo.model("gemma3"), adapters) as server, Client(server.grpc) as c:
        yield c


def test_rows_of_an_image_see_the_rows_after_them(zoo, client):
    """Without token_type_ids transformers lets them see those before them alone."""
    inputs = inputs_of("gemma3", [5, Picture(1, SIDE, SIDE), 6, 7])
    ids, images = prompt_of(inputs)
    chosen = list(range(client.info().model.vocab_size))
    result = client.score([ids], [None], chosen_token_ids=chosen, images=[images])
    oracle = zoo.oracle("gemma3")
    seen = for_oracle(inputs, [])

    def distances():
        return np.abs(result.chosen_logprobs[0][0][1:] - oracle.image_logprobs(None, seen)[:-1])

    # A GPU computes in bf16.
    assert distances().max() < (1e-4 if device() == "cpu" else 0.2)
    del seen["token_type_ids"]
    assert distances().max() > 1.0


def test_published_files_have_another_name_of_the_tower(zoo, client, tmp_path):
    folder = shutil.copytree(zoo.model("gemma3"), tmp_path / "model")
    rename(folder / "model.safetensors", TOWER, OLDER)
    ids, images = prompt([5, Picture(1, SIDE, SIDE), 6, 7])
    with serve(folder) as server, Client(server.grpc) as other:
        theirs = other.score([ids], [None], images=[images]).logprobs[0][0]
    ours = client.score([ids], [None], images=[images]).logprobs[0][0]
    assert np.array_equal(ours[1:], theirs[1:])


@pytest.mark.parametrize("outer", ["model.", ""])
def test_an_adapter_of_an_older_version_is_the_same_adapter(zoo, client, tmp_path, outer):
    folder = shutil.copytree(zoo.adapter("gemma3", "dora_tower"), tmp_path / "older")
    rename(folder / WEIGHTS, r"model\." + TOWER, outer + OLDER)
    if not outer:
        rename(folder / WEIGHTS, r"model\.language_model\.", "language_model.model.")
    digest = client.publish("new", path=zoo.adapter("gemma3", "dora_tower")).digest
    assert client.publish(f"older{len(outer)}", path=folder).digest == digest


@pytest.mark.skipif(device() != "cpu", reason="the lengths are for a CPU's pages")
def test_a_prefix_that_ends_within_an_image_keeps_the_bits(zoo):
    """Pages are evicted from the end of a prefix on."""
    ids, images = prompt([*range(20, 27), Picture(1, SIDE, SIDE), *range(30, 36)])
    first, last = images[0].offset, images[0].offset + TOKENS
    assert first < TOKENS < last  # a page ends within the image
    filler = list(range(10, 110))
    options = {"max_tokens": 4, "ignore_eos": True, "seed": 4, "logprobs": "raw"}
    with serve(zoo.model("gemma3")) as server, Client(server.grpc) as c:
        (expected,) = c.generate(ids, images=images, bypass_prefix_cache=True, **options)
    cached = set()
    for length in (96, 92, 100, 88, 104, 84, 108):  # one of them evicts part of the image
        settings = {"engine.kv_bytes": "200KiB", "model.max_context": 128}
        with serve(zoo.model("gemma3"), settings=settings) as server, Client(server.grpc) as c:
            c.generate(ids, images=images, **options | {"max_tokens": 1})
            c.generate(filler[:length], **options)
            (again,) = c.generate(ids, images=images, **options)
        assert np.array_equal(again.token_ids, expected.token_ids)
        assert np.array_equal(again.logprobs, expected.logprobs)
        cached.add(again.usage.cached_prompt_tokens)
        if any(first < count < last for count in cached):
            return
    raise AssertionError(cached)


def violations_of(client, ids, images):
    with pytest.raises(DoradError) as refusal:
        client.generate(ids, images=images, max_tokens=2)
    return [(each.reason, str(each)) for each in refusal.value.violations]


def test_an_image_of_another_size_is_refused(client):
    ids, (image,) = prompt([5, Picture(1, SIDE, SIDE), 6])
    wide = Image(image.offset, image.length, (1, 4, 16), np.asarray(image.pixels))
    ((reason, text),) = violations_of(client, ids, [wide])
    assert reason == "IMAGE_GRID_INVALID" and "8 x 8 patches" in text


@pytest.mark.parametrize("images", [1, 2])
def test_text_must_follow_an_image(client, images):
    _, (image,) = prompt([5, Picture(1, SIDE, SIDE), 6])
    ids = [5, *[IMAGE] * TOKENS * images]
    placed = [
        Image(1 + i * TOKENS, TOKENS, image.grid, np.asarray(image.pixels)) for i in range(images)
    ]
    found = violations_of(client, ids, placed)
    assert found and {reason for reason, _ in found} == {"IMAGE_PLACE_INVALID"}
    assert "text must follow" in found[0][1]


def test_an_image_that_fits_no_step_is_refused(zoo):
    ids, images = prompt([5, Picture(1, SIDE, SIDE), 6])
    settings = {"engine.max_step_tokens": TOKENS - 1}
    with serve(zoo.model("gemma3"), settings=settings) as server, Client(server.grpc) as c:
        ((reason, text),) = violations_of(c, ids, images)
        assert reason == "IMAGE_TOO_LARGE" and "engine.max_step_tokens" in text
        assert len(c.generate([5, 6, 7], max_tokens=2, ignore_eos=True)[0].token_ids) == 2


def test_a_parameter_of_the_projector_is_no_target(zoo, client, tmp_path):
    folder = shutil.copytree(zoo.adapter("gemma3", "dora_tower"), tmp_path / "parameter")
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    config["target_parameters"] = ["multi_modal_projector.mm_input_projection_weight"]
    path.write_text(json.dumps(config))
    with pytest.raises(DoradError) as refusal:
        client.publish("parameter", path=folder)
    assert "target_parameters" in str(refusal.value)
