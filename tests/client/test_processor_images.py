"""Images of prompts that a trainer's processor has tokenized."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import PIL.Image
import pytest
from dorad import _processor_images
from dorad._processor_images import Placed, identity, placed, unsampled
from dorad.pictures import ModelPictures
from dorad.text import ModelText
from lib.pictures import photo, place_of
from lib.processors import gemma3, qwen3_vl
from transformers import AutoConfig

PROCESSORS = {"qwen3_vl": qwen3_vl, "gemma3": gemma3}
PICTURES = [photo(1, 12, 8), photo(2, 9, 21)]


def made(folder, family):
    """Token ids, and images of ModelPictures."""
    place = place_of(family)
    return ModelPictures(ModelText(folder)).place(f"a{place}b{place}c", PICTURES)


@pytest.fixture(scope="module")
def folder(zoo):
    return zoo.model_with_processor("qwen3_vl")


@pytest.fixture(scope="module")
def config(folder):
    return AutoConfig.from_pretrained(folder)


@pytest.fixture(scope="module")
def expected(folder):
    return made(folder, "qwen3_vl")


def named(images):
    return [(each.offset, each.length, each.grid, each.sha256) for each in images]


@pytest.mark.parametrize("family", PROCESSORS)
def test_places_and_pixels_are_those_of_the_models_processor(zoo, family):
    folder = zoo.model_with_processor(family)
    ids, images = made(folder, family)
    config = AutoConfig.from_pretrained(folder)
    assert named(placed(PROCESSORS[family](folder), config, ids, PICTURES)) == named(images)


def test_options_are_the_processors(folder, config):
    processor = qwen3_vl(folder)
    ids = [5, *[3] * 4, 6]
    size = {"shortest_edge": 16, "longest_edge": 64}
    (image,) = placed(processor, config, ids, [photo(1, 12, 8)], size=size)
    assert image.length == 4
    with pytest.raises(ValueError, match="placeholders"):
        placed(processor, config, [3, *ids], [photo(1, 12, 8)])


def test_equal_prompts_are_prepared_once_at_the_same_time_or_later(
    folder, config, expected, monkeypatch
):
    ids, images = expected
    calls, begun, go_on = [], threading.Event(), threading.Event()

    def slow(*arguments, **options):
        calls.append(arguments)
        begun.set()
        assert go_on.wait(60)
        return placed(*arguments, **options)

    monkeypatch.setattr(_processor_images, "placed", slow)
    prepare = Placed(qwen3_vl(folder), config)
    with ThreadPoolExecutor(4) as threads:
        copies = [[picture.copy() for picture in PICTURES] for _ in range(4)]
        found = [threads.submit(prepare, ids, copy) for copy in copies]
        assert begun.wait(60)
        go_on.set()
        assert [named(each.result(60)) for each in found] == [named(images)] * 4
    assert named(prepare(ids, PICTURES)) == named(images)
    assert len(calls) == 1
    prepare([8, *ids], PICTURES)
    prepare(ids, [PICTURES[0], photo(3, 9, 21)])
    prepare(ids, PICTURES, do_convert_rgb=True)
    assert len(calls) == 4


def test_a_failure_is_that_of_all_who_wait_and_old_prompts_are_forgotten(
    folder, config, monkeypatch
):
    prepare = Placed(qwen3_vl(folder), config)
    for _ in range(2):
        with pytest.raises(ValueError, match="placeholders"):
            prepare([5], PICTURES)
    calls = []
    monkeypatch.setattr(_processor_images, "placed", lambda *a, **_: calls.append(a) or [])
    for prompt in [*range(Placed.MOST), *range(Placed.MOST)]:
        prepare([prompt], [])
    assert len(calls) == Placed.MOST
    prepare([Placed.MOST], [])
    prepare([0], [])
    assert len(calls) == Placed.MOST + 2


def test_pictures_are_told_apart_by_what_a_processor_sees():
    picture = photo(1, 12, 8)
    assert identity(picture) == identity(picture.copy())
    assert identity(picture) == identity(picture.convert("RGBA"))
    assert identity(picture) != identity(photo(2, 12, 8))
    flat = PIL.Image.new("RGB", (8, 12)), PIL.Image.new("RGB", (12, 8))
    assert identity(flat[0]) != identity(flat[1])
    turned = picture.copy()
    turned.getexif()[0x0112] = 6
    assert identity(turned) != identity(picture)
    array = np.zeros((3, 4, 4))
    assert identity(array) == identity(array) != identity(array.copy())


def test_placeholders_are_not_sampled():
    assert unsampled(SimpleNamespace(image_token_id=3, video_token_id=4)) == [[3], [4]]
    assert unsampled(SimpleNamespace(image_token_id=3)) == [[3]]
    assert unsampled(SimpleNamespace()) == []
