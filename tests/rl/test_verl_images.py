"""verl and images: a prompt's pictures reach the server with the pixels of verl's processor."""

import json
import shutil

import pytest

VIDEOS = {"qwen3_vl": "Qwen3VLVideoProcessor", "qwen25_vl": "Qwen2VLVideoProcessor"}


@pytest.fixture(scope="module", params=VIDEOS)
def found(zoo, drive, result_of, tmp_path_factory, request):
    """Files of Qwen2.5-VL name its weights otherwise than the model in memory."""
    root = tmp_path_factory.mktemp("verl-images")
    folder = shutil.copytree(zoo.model_with_processor(request.param), root / "model")
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"pad_token": "</s>"}))
    video = {"video_processor_type": VIDEOS[request.param]}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    adapters = zoo.copy_adapters(request.param, [("dora_tower", 0)], root / "adapters")
    with drive("verl_images", folder, adapters) as program:
        return result_of(program)


def test_the_policy_that_sees_pictures_is_the_published_one(found, figures):
    assert len(found["same"]) == 9 and max(found["same"]) < 1e-4
    figures.append(f"verl with pictures: max |Δlogprob| {max(found['same']):.1e}")
    with_pictures, without = found["others"][:6], found["others"][6:]
    assert min(with_pictures) > 1e-3 and max(without) < 1e-4


def test_no_sample_has_a_placeholder(found):
    assert found["placeholders"] == 0


def test_another_tower_is_refused(found):
    assert (
        "model.visual.patch_embed.proj.weight: differs from the server's base model"
        in found["base"]
    )


def test_videos_and_pictures_without_a_place_are_refused(found):
    video, misplaced = found["refused"]
    assert "videos" in video and "placeholders" in misplaced
