"""Pictures in chats of Gemma 3: an image's text becomes one with the text around it."""

import json
import shutil

import numpy as np
import pytest
from dorad._processor_images import placed
from dorad.images import from_processor
from dorad.pictures import ModelPictures
from dorad.text import ModelText
from lib.pictures import (
    GEMMA_LENGTH,
    GEMMA_NAMES,
    GEMMA_PROCESSOR,
    MERGE,
    PATCH,
    SIDE,
    encoded,
    photo,
    processed,
)
from lib.processors import gemma3
from transformers import AutoConfig

PLACE = "<start_of_image>"
TOKENS = (SIDE // MERGE) ** 2
IMAGE = {"type": "image"}
PHOTOS = [photo(1, 12, 8), photo(2, 9, 41)]


def text(words):
    return {"type": "text", "text": words}


def user(*parts):
    return {"role": "user", "content": list(parts)}


CHATS = {
    "before": [user(IMAGE, text("What?"))],
    "after": [user(text("What?"), IMAGE)],
    "newlines": [user(text("a\n"), IMAGE, text("\n\nb\n\n\n"))],
    "two": [user(IMAGE, IMAGE, text("?"))],
    "two-apart": [user(IMAGE, text("\n"), IMAGE)],
    "second-turn": [
        {"role": "user", "content": "Hello\n"},
        {"role": "assistant", "content": "Yes?\n\n"},
        user(text("\n"), IMAGE, text("?")),
    ],
    "none": [{"role": "user", "content": "a\n\nb"}],
}


@pytest.fixture(scope="module")
def folder(zoo):
    return zoo.model_with_processor("gemma3")


@pytest.fixture(scope="module")
def pictures(folder):
    return ModelPictures(ModelText(folder))


def named(images):
    return [(each.offset, each.length, each.grid, each.dtype, each.data) for each in images]


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_that_of_the_processor(folder, pictures, name):
    messages, model, theirs = CHATS[name], ModelText(folder), gemma3(folder)
    written = model.render_chat(messages)
    photos = PHOTOS[: written.count(PLACE)]
    assert theirs.apply_chat_template(messages, add_generation_prompt=True) == written
    inputs = theirs(
        images=photos or None, text=written, add_special_tokens=False, return_tensors="np"
    )
    ids, images = pictures.place(written, photos)
    assert ids == inputs["input_ids"][0].tolist()
    grid = (1, SIDE, SIDE)
    assert [(each.length, each.grid) for each in images] == [(TOKENS, grid)] * len(photos)
    assert named(images) == named(from_processor(inputs, 3, patch_size=PATCH, merge_size=MERGE)[1])
    for image, pixels in zip(images, inputs.get("pixel_values", ()), strict=True):
        assert ids[image.offset - 1 : image.offset] == [1] and ids[image.offset + TOKENS] == 0
        cells = SIDE // MERGE
        ours = np.frombuffer(image.data, np.float32)
        ours = ours.reshape(cells, cells, MERGE, MERGE, 3, PATCH, PATCH)
        assert np.array_equal(ours.transpose(4, 0, 2, 5, 1, 3, 6).reshape(pixels.shape), pixels)


def test_newlines_of_the_text_and_of_the_image_are_one_token(folder, pictures):
    """What no tokens of the chat template's text alone can become."""
    model = ModelText(folder)
    (run,) = model.encode("\n\n\n", special_tokens=False)
    assert pictures.place(f"\n{PLACE}\n", PHOTOS[:1])[0] == [run, 1, *[3] * TOKENS, 0, run]


@pytest.mark.parametrize(
    ("written", "places"),
    [
        (f"{PLACE} and {PLACE}", 2),
        (f"{PLACE} and <image_soft_token>", 2),
        ("none", 0),
        ("<image_soft_token> alone", 1),
    ],
)
def test_a_text_with_the_spelling_of_a_placeholder_is_refused(pictures, written, places):
    photos = PHOTOS[:1] if places != 1 else []
    with pytest.raises(ValueError, match=f"{places} placeholders for {len(photos)} images"):
        pictures.place(written, photos)


def test_other_tokens_of_images_are_text(folder, pictures):
    written = f"{PLACE}<end_of_image>\n"
    assert (
        pictures.place(written, PHOTOS[:1])[0]
        == processed("gemma3", written, PHOTOS[:1], ModelText(folder))[0]
    )


def files_of(folder, copy, **files):
    """A folder with other values in its files of JSON. None: without the file."""
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    for name, changes in files.items():
        file = copy / f"{name}.json"
        if changes is None:
            file.unlink()
        else:
            known = json.loads(file.read_text()) if file.exists() else {}
            file.write_text(json.dumps(known | changes))
    return ModelText(copy)


NOT_THE_TOKEN = "which is not the token"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"preprocessor_config": {"do_pan_and_scan": True}}, "do_pan_and_scan is on"),
        ({"preprocessor_config": {"size": {"height": 16, "width": 8}}}, "image_size is 16"),
        ({"preprocessor_config": {"size": {"shortest_edge": 16}}}, "image_size is 16"),
        ({"processor_config": {"image_seq_length": 4}}, "image_seq_length is 4, and 16"),
        ({"config": {"boi_token_index": 2}}, f"'<start_of_image>', {NOT_THE_TOKEN} 2"),
        ({"tokenizer_config": {"boi_token": "<s>"}}, f"'<s>', {NOT_THE_TOKEN} 1"),
        ({"tokenizer_config": {"eoi_token": "</s>"}}, f"'</s>', {NOT_THE_TOKEN} 0"),
        ({"tokenizer_config": {"image_token": "<s>"}}, f"'<s>', {NOT_THE_TOKEN} 3"),
        ({"tokenizer_config": None}, f"boi_token .* None, {NOT_THE_TOKEN} 1"),
    ],
)
def test_files_that_do_not_fit_each_other_are_named(folder, tmp_path, files, words):
    with pytest.raises(ValueError, match=words):
        ModelPictures(files_of(folder, tmp_path, **files))


NAMES = {
    name: value for name, value in GEMMA_NAMES.items() if name.endswith(("i_token", "e_token"))
}
SAVED = {"image_processor": GEMMA_PROCESSOR, **GEMMA_LENGTH}
FORMS = {
    "transformers-5": {"preprocessor_config": None, "processor_config": SAVED},
    "no-length": {"processor_config": None},
    "named-among-others": {
        "tokenizer_config": {**dict.fromkeys(NAMES), "extra_special_tokens": NAMES}
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_other_forms_of_a_folder_are_the_same(folder, pictures, tmp_path, form):
    other = ModelPictures(files_of(folder, tmp_path, **FORMS[form]))
    (ids, ours), (other_ids, theirs) = (
        each.place(f"a{PLACE}", [each.read(encoded(PHOTOS[1]))]) for each in (pictures, other)
    )
    assert ids == other_ids and named(ours) == named(theirs)


def test_the_placeholder_of_a_chat_template_is_not_that_of_the_tokens(folder):
    """The processor's image_token_id is the former."""
    theirs = gemma3(folder)
    inputs = theirs(images=PHOTOS, text=PLACE * 2, add_special_tokens=False, return_tensors="np")
    with pytest.raises(ValueError, match="2 placeholders 1 do not fit"):
        from_processor(inputs, theirs.image_token_id, patch_size=PATCH, merge_size=MERGE)


def test_a_trainer_may_have_crops(folder):
    theirs, wide = gemma3(folder), photo(5, 8, 32)
    crops = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 4}
    inputs = theirs(images=[wide], text=f"a{PLACE}", return_tensors="np", **crops)
    ids = inputs["input_ids"][0].tolist()
    images = placed(theirs, AutoConfig.from_pretrained(folder), ids, [wide], **crops)
    expected = from_processor(inputs, 3, patch_size=PATCH, merge_size=MERGE)[1]
    assert len(images) == 5 and named(images) == named(expected)
