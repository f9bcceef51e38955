"""Images for vLLM's engine of a random model: the processor that a published model has beside its
weights, with a tokenizer that knows the image's tokens alone, and prompts of one image."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from make_random_model import Shape
from tokenizers import Tokenizer, models

SIDE = 64  # patches on a side of an image
TEXT = 16  # tokens before it, and after it

_MEAN, _STD = [0.5, 0.5, 0.5], [0.5, 0.5, 0.5]


def _pixels(shape: Shape) -> int:
    """On a side of the image."""
    assert shape.tower is not None
    return SIDE * int(shape.tower["vision_config"]["patch_size"])


def _qwen(shape: Shape) -> tuple[dict[str, int], dict[str, Any], dict[str, dict[str, Any]]]:
    tower, area = shape.tower, _pixels(shape) ** 2
    assert tower is not None
    tokens = {
        "<|vision_start|>": tower["vision_start_token_id"],
        "<|vision_end|>": tower["vision_end_token_id"],
        "<|image_pad|>": tower["image_token_id"],
        "<|video_pad|>": tower["video_token_id"],
    }
    vision = tower["vision_config"]
    sizes = {
        "patch_size": vision["patch_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "size": {"shortest_edge": area, "longest_edge": area},
        "image_mean": _MEAN,
        "image_std": _STD,
    }
    name = "Qwen2_5_VLProcessor" if tower["model_type"] == "qwen2_5_vl" else "Qwen3VLProcessor"
    video = "Qwen2VLVideoProcessor" if name == "Qwen2_5_VLProcessor" else "Qwen3VLVideoProcessor"
    files = {
        "preprocessor_config.json": sizes
        | {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": name},
        "video_preprocessor_config.json": sizes
        | {"video_processor_type": video, "processor_class": name},
    }
    return tokens, {}, files


def _mistral(shape: Shape) -> tuple[dict[str, int], dict[str, Any], dict[str, dict[str, Any]]]:
    tower = shape.tower
    assert tower is not None
    image = int(tower["image_token_index"])
    tokens = {"[IMG]": image, "[IMG_BREAK]": image + 2, "[IMG_END]": image + 3}
    patch = tower["vision_config"]["patch_size"]
    files = {
        "preprocessor_config.json": {
            "image_processor_type": "PixtralImageProcessor",
            "processor_class": "PixtralProcessor",
            "patch_size": patch,
            # vLLM starts with the largest image that the tower takes.
            "size": {"longest_edge": tower["vision_config"]["image_size"]},
            "image_mean": _MEAN,
            "image_std": _STD,
        },
        "processor_config.json": {
            "processor_class": "PixtralProcessor",
            "patch_size": patch,
            "spatial_merge_size": tower["spatial_merge_size"],
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
        },
    }
    return tokens, {}, files


def _gemma(shape: Shape) -> tuple[dict[str, int], dict[str, Any], dict[str, dict[str, Any]]]:
    tower = shape.tower
    assert tower is not None
    tokens = {
        "<start_of_image>": tower["boi_token_index"],
        "<end_of_image>": tower["eoi_token_index"],
        "<image_soft_token>": tower["image_token_index"],
        # Newlines that follow each other are one token.
        **{"\n" * length: 106 + length for length in range(1, 6)},
    }
    names = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    side = _pixels(shape)
    files = {
        "preprocessor_config.json": {
            "image_processor_type": "Gemma3ImageProcessor",
            "processor_class": "Gemma3Processor",
            "size": {"height": side, "width": side},
            "image_mean": _MEAN,
            "image_std": _STD,
        },
        "processor_config.json": {
            "processor_class": "Gemma3Processor",
            "image_seq_length": tower["mm_tokens_per_image"],
        },
    }
    return tokens, names, files


def _family(shape: Shape) -> Any:
    assert shape.tower is not None
    return {"mistral3": _mistral, "gemma3": _gemma}.get(shape.tower["model_type"], _qwen)


def write_processor(shape: Shape, folder: Path) -> None:
    """Beside the config.json of a model with a tower."""
    tokens, names, files = _family(shape)(shape)
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **tokens}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    tokenizer.add_special_tokens(list(vocab))
    tokenizer.save(str(folder / "tokenizer.json"))
    files["tokenizer_config.json"] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
        "unk_token": "<unk>",
        **names,
    }
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values))


def prompt(shape: Shape, seed: int) -> dict[str, Any]:
    """As vLLM takes it: the image is random pixels, other ones for each seed."""
    tokens, _, _ = _family(shape)(shape)
    ids = list(tokens.values())
    # Qwen's image lies between two tokens of its own; the others' processors add theirs.
    image = [ids[0], ids[2], ids[1]] if "<|image_pad|>" in tokens else [ids[0]]
    text = list(range(1000, 1000 + TEXT - len(image) // 2))
    side = _pixels(shape)
    values = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return {
        "prompt_token_ids": text + image + text,
        "multi_modal_data": {"image": PIL.Image.fromarray(values)},
    }
