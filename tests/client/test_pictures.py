"""`dorad.pictures`: what a model's own processor makes of pictures, and its mistakes by name."""

import json
import random

import numpy as np
import PIL.Image
import pytest
from dorad._processor_images import placed
from dorad.pictures import ModelPictures
from dorad.text import ModelText
from lib.pictures import (
    MISTRAL_PROCESSOR,
    MISTRAL_SIZES,
    PROCESSOR,
    encoded,
    photo,
    place_of,
    processed,
)

PNG = encoded(photo(1, 12, 8))
PLACE = place_of("qwen3_vl")
SIZES = [(12, 8), (9, 21), (20, 22), (1, 17), (70, 90), (24, 24)]


@pytest.fixture(scope="module")
def folder(zoo):
    return zoo.model_with_processor("qwen3_vl")


@pytest.fixture(scope="module")
def of_mistral(zoo):
    return zoo.model_with_processor("mistral3")


def pictures_of(folder):
    return ModelPictures(ModelText(folder))


def named(images):
    return [(each.offset, each.length, each.grid, each.dtype, each.data) for each in images]


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen35", "qwen25_vl", "mistral3", "gemma3"])
def test_tokens_and_pixels_are_those_of_transformers(zoo, family):
    folder = zoo.model_with_processor(family)
    text, place = ModelText(folder), place_of(family)
    pictures = ModelPictures(text)
    for chosen in ([(12, 8)], SIZES, SIZES[::-1]):
        photos = [photo(height, height, width) for height, width in chosen]
        written = "a" + f"{place}, ".join([""] * (len(photos) + 1)) + "b"
        ids, images = processed(family, written, photos, text)
        placed = pictures.place(written, [pictures.read(encoded(each)) for each in photos])
        assert placed[0] == ids and len(images) == len(photos)
        assert named(placed[1]) == named(images)
        beginning = text.encode("", special_tokens=True)
        placed = pictures.place(written, photos, special_tokens=True)
        assert placed[0] == [*beginning, *ids] and placed[1][0].offset == images[0].offset + 1
    assert pictures.place("ab", []) == (text.encode("ab", special_tokens=False), [])


def test_the_whole_processor_of_transformers_makes_the_same(of_mistral, tmp_path):
    """Where torchvision is: transformers' processor of texts and images needs it."""
    pytest.importorskip("torchvision")
    from transformers import AutoConfig, AutoProcessor

    special = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "[IMG_BREAK]"}
    copy = files_of(of_mistral, tmp_path, preprocessor_config=MISTRAL_PROCESSOR)
    (copy / "processor_config.json").write_text(json.dumps(MISTRAL_SIZES))
    (copy / "tokenizer_config.json").unlink()
    (copy / "tokenizer_config.json").write_text(json.dumps(special))
    photos = [photo(height, height, width) for height, width in SIZES]
    messages = [{"role": "user", "content": [{"type": "image"} for _ in photos]}]
    theirs = AutoProcessor.from_pretrained(copy)
    text = theirs.apply_chat_template(messages, add_generation_prompt=True)
    inputs = theirs(images=photos, text=text, add_special_tokens=False, return_tensors="np")
    written = ModelText(copy).render_chat(messages)
    ids, images = pictures_of(copy).place(written, photos)
    assert ids == inputs["input_ids"][0].tolist()
    assert named(placed(theirs, AutoConfig.from_pretrained(copy), ids, photos)) == named(images)
    assert [(1, height // 2, width // 2) for height, width in inputs["image_sizes"]] == [
        each.grid for each in images
    ]
    for image, pixels in zip(images, inputs["pixel_values"], strict=True):
        _, height, width = image.grid
        ours = np.frombuffer(image.data, np.float32).reshape(height // 2, width // 2, 2, 2, 3, 2, 2)
        whole = ours.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, height * 2, width * 2)
        assert np.array_equal(whole, pixels[:, : height * 2, : width * 2])


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"processor_config": {**MISTRAL_SIZES, "patch_size": 4}}, "patch_size is 4, and 2"),
        ({"processor_config": {"spatial_merge_size": 1}}, "spatial_merge_size is 1, and 2"),
        (
            {"processor_config": {"image_break_token": "[ROW]"}},
            r"tokenizer.json has no token \[ROW",
        ),
        ({"processor_config": {"image_end_token": "[STOP]"}}, r"has no token \[STOP"),
    ],
)
def test_a_processor_that_does_not_fit_the_model_is_named(of_mistral, tmp_path, files, words):
    copy = files_of(of_mistral, tmp_path, preprocessor_config=MISTRAL_PROCESSOR, **files)
    with pytest.raises(ValueError, match=words):
        pictures_of(copy)


def test_the_tokens_between_rows_may_have_other_names(of_mistral, tmp_path):
    sizes = {"image_break_token": "</x>", "image_end_token": "<s>"}
    copy = files_of(
        of_mistral,
        tmp_path,
        preprocessor_config=MISTRAL_PROCESSOR,
        processor_config={**sizes, "patch_size": 2},
    )
    file = copy / "tokenizer.json"
    tokenizer = file.read_text().replace("[IMG_BREAK]", "</x>")
    file.unlink()
    file.write_text(tokenizer)
    ids, (image,) = pictures_of(copy).place("[IMG][IMG_END]", [photo(1, 8, 8)])
    assert (ids, image.length) == ([3, 3, 2, 3, 3, 1, 0], 4)


def files_of(folder, copy, **files):
    for file in folder.iterdir():
        if "processor" not in file.name:
            (copy / file.name).symlink_to(file)
    for name, value in files.items():
        (copy / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return copy


def test_a_processor_that_transformers_5_saved_is_the_same(folder, tmp_path):
    copy = files_of(folder, tmp_path, processor_config={"image_processor": PROCESSOR})
    (one,), (other,) = (
        pictures.place(PLACE, [pictures.read(PNG)])[1]
        for pictures in (pictures_of(folder), pictures_of(copy))
    )
    assert (one.sha256, one.grid, one.length) == (other.sha256, other.grid, other.length)


def test_qwen25_vl_has_the_same_processor(folder, zoo):
    (one,), (other,) = (
        pictures.place(PLACE, [pictures.read(PNG)])[1]
        for pictures in (pictures_of(folder), pictures_of(zoo.model_with_processor("qwen25_vl")))
    )
    assert (one.sha256, one.grid, one.length) == (other.sha256, other.grid, other.length)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"processor_config": {"processor_class": "Qwen3VLProcessor"}},
        {"preprocessor_config": "{"},
        {"preprocessor_config": {"image_processor_type": "Unknown"}},
    ],
    ids=["none", "no-images", "no-json", "unknown"],
)
def test_a_processor_that_cannot_be_read_is_named(folder, tmp_path, files):
    copy = files_of(folder, tmp_path, **files)
    with pytest.raises((ValueError, FileNotFoundError), match=str(copy)):
        pictures_of(copy)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_broken_pictures_are_refused_or_read(folder):
    """Whatever is broken in a file: ValueError, and no other error of a format's reader."""
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    whole = [
        encoded(photo(1, 16, 16, mode), kind, **options)
        for mode, kind, options in (
            ("RGB", "PNG", {"exif": exif}),
            ("P", "PNG", {}),
            ("RGB", "JPEG", {"exif": exif}),
            ("L", "JPEG", {"progressive": True}),
            ("RGB", "WEBP", {"exif": exif}),
            ("RGBA", "WEBP", {"lossless": True}),
        )
    ]
    pictures, choose, refused = pictures_of(folder), random.Random(1), 0
    for _ in range(1000):
        data = bytearray(choose.choice(whole))
        for _ in range(choose.choice([1, 2, 10])):
            data[choose.randrange(len(data))] = choose.randrange(256)
        try:
            assert pictures.read(bytes(data)).mode == "RGB"
        except ValueError:
            refused += 1
    assert 0 < refused < 1000
