"""Pixels as bytes: the server makes the numbers of the model's own processor of them."""

import dorad
import numpy as np
import pytest
from lib.pictures import GEMMA_PROCESSOR, MERGE, MISTRAL_PROCESSOR, PATCH, PROCESSOR, SIDE, photo
from lib.server import serve
from lib.tiny_models import IMAGE

FAMILIES = ["qwen3_vl", "mistral3", "gemma3"]
OPTIONS = {"max_tokens": 6, "ignore_eos": True, "seed": 5, "logprobs": "raw"}
RAW = {"do_rescale": False, "do_normalize": False}


def processor_of(family):
    if family == "mistral3":
        from transformers.models.pixtral.image_processing_pil_pixtral import (
            PixtralImageProcessorPil as Processor,
        )

        values = MISTRAL_PROCESSOR | {"patch_size": PATCH * MERGE}
    elif family == "gemma3":
        from transformers.models.gemma3.image_processing_pil_gemma3 import (
            Gemma3ImageProcessorPil as Processor,
        )

        values = GEMMA_PROCESSOR
    else:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil as Processor,
        )

        values = PROCESSOR
    return Processor(**{k: v for k, v in values.items() if k != "image_processor_type"})


def prompt(family, features):
    """Between texts, with a break between the rows of Mistral's."""
    if family == "mistral3":
        ((height, width),) = features["image_sizes"]
        side = PATCH * MERGE
        row = [*[IMAGE] * (width // side), 7]
        places = (row * (height // side))[:-1]
    elif family == "gemma3":
        places = [IMAGE] * (SIDE // MERGE) ** 2
    else:
        places = [IMAGE] * (features["image_grid_thw"][0].prod() // MERGE**2)
    inputs = {**features, "input_ids": [5, 6, *places, 8]}
    return dorad.images.from_processor(inputs, IMAGE, patch_size=PATCH, merge_size=MERGE)


def both(family, seed=1):
    """The prompt with the processor's numbers, and with bytes."""
    processor, picture = processor_of(family), photo(seed, 12, 20)
    numbers = processor(images=[picture], return_tensors="np")
    raw = processor(images=[picture], return_tensors="np", **RAW)
    pixels = np.asarray(raw["pixel_values"])
    assert np.array_equal(pixels, pixels.astype(np.uint8))
    return prompt(family, numbers), prompt(family, {**raw, "pixel_values": pixels.astype(np.uint8)})


@pytest.fixture(scope="module", params=FAMILIES)
def served(zoo, request, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("bytes") / "memory.sock")
    settings = {"server.shared_memory_socket": path}
    with serve(zoo.model_with_processor(request.param), {}, settings) as server:
        yield request.param, server, path


def test_bytes_give_the_bits_of_the_processors_numbers(served):
    family, server, path = served
    (ids, numbers), (other_ids, raw) = both(family)
    assert np.array_equal(ids, other_ids) and raw[0].dtype == "uint8"
    assert len(raw[0].data) * 4 == len(numbers[0].data)
    with dorad.Client(server.grpc) as client:
        (expected,) = client.generate(ids, images=numbers, **OPTIONS)
        (found,) = client.generate(ids, images=raw, **OPTIONS)
        assert np.array_equal(found.token_ids, expected.token_ids)
        assert np.array_equal(found.logprobs, expected.logprobs)
        rows = [client.score([ids], [None], images=[images])[0][0] for images in (numbers, raw)]
        assert np.array_equal(rows[0][1:], rows[1][1:])
        by_digest = [image.without_pixels() for image in raw]
        (again,) = client.generate(ids, images=by_digest, **OPTIONS)
        assert np.array_equal(again.logprobs, expected.logprobs)
    _, (ids, raw) = both(family, seed=2)
    with dorad.Client(server.grpc) as plain, dorad.Client(server.grpc, shared_memory=path) as near:
        (ours,) = near.generate(ids, images=raw, **OPTIONS)
        (theirs,) = plain.generate(ids, images=raw, **OPTIONS)
        assert np.array_equal(ours.logprobs, theirs.logprobs)
        assert not np.array_equal(ours.logprobs, expected.logprobs)


def test_without_the_processors_file_bytes_are_refused_by_name(zoo):
    (ids, numbers), (_, raw) = both("qwen3_vl")
    with serve(zoo.model("qwen3_vl")) as server, dorad.Client(server.grpc) as client:
        client.generate(ids, images=numbers, **OPTIONS)
        with pytest.raises(dorad.InvalidArgument, match=r"preprocessor_config\.json") as error:
            client.generate(ids, images=raw, **OPTIONS)
        assert [v.reason for v in error.value.violations] == ["IMAGE_BYTES_UNSUPPORTED"]


def test_a_processors_file_that_is_not_understood_keeps_numbers_served(zoo, tmp_path):
    for file in zoo.model_with_processor("qwen3_vl").iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')
    (ids, numbers), (_, raw) = both("qwen3_vl")
    with serve(tmp_path) as server, dorad.Client(server.grpc) as client:
        client.generate(ids, images=numbers, **OPTIONS)
        with pytest.raises(dorad.InvalidArgument, match="image_mean must be 3 numbers"):
            client.generate(ids, images=raw, **OPTIONS)
