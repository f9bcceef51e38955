"""Images for tests: random patches as the families' processors make them, and pictures in files."""

import base64
import io
import json
from dataclasses import dataclass
from pathlib import Path

import dorad
import numpy as np
import PIL.Image
import torch

from lib.texts import make_tokenizer
from lib.tiny_models import IMAGE

# Those whose images are served.
FAMILIES = ["qwen3_vl", "qwen25_vl", "mistral3", "gemma3", "qwen35"]

# Of the tiny towers: pixels on a side of a patch, and patches on a side of a token.
PATCH, MERGE = 2, 2
# 3 channels x 2 frames x 2 x 2 pixels, with Qwen.
ELEMENTS = 24
START, END = 1, 0
# With Mistral: between the rows of an image.
BREAK = 2
# With Gemma every image has so many patches on a side.
SIDE = 8


@dataclass(frozen=True)
class Picture:
    seed: int
    # In patches.
    height: int
    width: int
    dtype: torch.dtype = torch.float32

    def random(self, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(*shape, generator=generator).to(self.dtype)


def inputs_of(family: str, parts: list) -> dict[str, torch.Tensor]:
    """A processor's result for a prompt: token ids, with pictures in between."""
    of_mistral, of_gemma = family.startswith("mistral3"), family == "gemma3"
    ids: list[int] = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
        elif of_gemma:
            ids += [START, *[IMAGE] * (SIDE // MERGE) ** 2, END]
        elif of_mistral:
            row = [*[IMAGE] * (part.width // MERGE), BREAK]
            ids += [*(row * (part.height // MERGE))[:-1], END]
        else:
            ids += [START, *[IMAGE] * (part.height * part.width // MERGE**2), END]
    inputs = {"input_ids": torch.tensor([ids])}
    pictures = [part for part in parts if isinstance(part, Picture)]
    if pictures:
        make = _padded if of_mistral else _squares if of_gemma else _patches
        inputs |= make(pictures)
    return inputs


def _squares(pictures: list[Picture]) -> dict[str, torch.Tensor]:
    pixels = [each.random(3, SIDE * PATCH, SIDE * PATCH) for each in pictures]
    return {"pixel_values": torch.stack(pixels)}


def _patches(pictures: list[Picture]) -> dict[str, torch.Tensor]:
    pixels = [each.random(each.height * each.width, ELEMENTS) for each in pictures]
    grids = [[1, each.height, each.width] for each in pictures]
    return {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor(grids)}


def _padded(pictures: list[Picture]) -> dict[str, torch.Tensor]:
    sizes = torch.tensor([[each.height * PATCH, each.width * PATCH] for each in pictures])
    height, width = sizes.amax(0).tolist()
    pixels = torch.zeros(len(pictures), 3, height, width, dtype=pictures[0].dtype)
    for image, each, (h, w) in zip(pixels, pictures, sizes.tolist(), strict=True):
        image[:, :h, :w] = each.random(3, h, w)
    return {"pixel_values": pixels, "image_sizes": sizes}


def for_oracle(inputs: dict[str, torch.Tensor], tokens: list[int]) -> dict[str, torch.Tensor]:
    """The same prompt with tokens after it. Without images transformers takes the ids alone."""
    ids = torch.cat([inputs["input_ids"], torch.tensor([tokens], dtype=torch.long)], dim=1)
    values = {**inputs, "input_ids": ids}
    if "image_grid_thw" in inputs:
        values["mm_token_type_ids"] = (ids == IMAGE).int()
    elif "pixel_values" in inputs and "image_sizes" not in inputs:
        values["token_type_ids"] = (ids == IMAGE).int()
    return values


def prompt_of(inputs: dict[str, torch.Tensor]) -> tuple[list[int], list[dorad.Image]]:
    ids, images = dorad.images.from_processor(inputs, IMAGE, patch_size=PATCH, merge_size=MERGE)
    return [int(i) for i in ids], images


# --- Files of pictures, and the tiny model's processor --------------------------------------------

# By their ids in the tiny models.
_QWEN_TOKENS = ["<|vision_end|>", "<|vision_start|>", "</s>", "<|image_pad|>", "<|video_pad|>"]
_MISTRAL_TOKENS = ["[IMG_END]", "<s>", "[IMG_BREAK]", "[IMG]"]
_GEMMA_TOKENS = ["<end_of_image>", "<start_of_image>", "</s>", "<image_soft_token>"]
# Newlines that follow each other are one token with Gemma.
_GEMMA_RUNS = ["\n" * length for length in range(2, 8)]
# What a chat template writes for an image.
_PLACES = {
    "qwen": "<|vision_start|><|image_pad|><|vision_end|>",
    "mistral3": "[IMG]",
    "gemma3": "<start_of_image>",
}
_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}"
    "PLACE{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}{{ '\n' }}{% endfor %}assistant: "
)
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 4 * 4, "longest_edge": 40 * 16},  # pixels: 1 to 40 tokens
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
}
# As Mistral-Small-3.1 has it: in two files.
MISTRAL_PROCESSOR = {
    "image_processor_type": "PixtralImageProcessorFast",
    "patch_size": PATCH,
    "size": {"longest_edge": 24},  # pixels: up to 6 x 6 tokens
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
}
MISTRAL_SIZES = {
    "processor_class": "PixtralProcessor",
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "image_token": "[IMG]",
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
}


# As Gemma 3 has it: in three files.
GEMMA_PROCESSOR = {
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": SIDE * PATCH, "width": SIDE * PATCH},
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
    "do_pan_and_scan": None,
}
GEMMA_LENGTH = {"processor_class": "Gemma3Processor", "image_seq_length": (SIDE // MERGE) ** 2}
GEMMA_NAMES = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "</s>",
    "pad_token": "</s>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}


def place_of(family: str) -> str:
    """What the family's chat template writes for an image."""
    return _PLACES.get(family, _PLACES["qwen"])


def make_processor(folder: Path, family: str) -> Path:
    """Writes a tokenizer, a chat template and an image processor into a model's folder."""
    template = _TEMPLATE.replace("PLACE", place_of(family))
    if family == "mistral3":
        make_tokenizer(folder, _MISTRAL_TOKENS, template)
        (folder / "preprocessor_config.json").write_text(json.dumps(MISTRAL_PROCESSOR))
        (folder / "processor_config.json").write_text(json.dumps(MISTRAL_SIZES))
    elif family == "gemma3":
        make_tokenizer(folder, _GEMMA_TOKENS, template, _GEMMA_RUNS)
        (folder / "preprocessor_config.json").write_text(json.dumps(GEMMA_PROCESSOR))
        (folder / "processor_config.json").write_text(json.dumps(GEMMA_LENGTH))
        (folder / "tokenizer_config.json").write_text(json.dumps(GEMMA_NAMES))
    else:
        make_tokenizer(folder, _QWEN_TOKENS, template)
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def photo(seed: int, height: int, width: int, mode: str = "RGB") -> PIL.Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8)
    return PIL.Image.fromarray(values).convert(mode)


def encoded(picture: PIL.Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def processed(family: str, written: str, pictures: list[PIL.Image.Image], tokenizer) -> tuple:
    """The token ids and images that transformers' own processor makes of a text with the places of
    images: written once more, without dorad's part of it, where torchvision is needed."""
    pictures = [picture.convert("RGB") for picture in pictures]
    if family == "gemma3":
        return prompt_of(_of_gemma(written, pictures, tokenizer.folder))
    if family == "mistral3":
        written, features = _of_mistral(written, pictures)
    else:
        written, features = _of_qwen(written, pictures)
    ids = tokenizer.encode(written, special_tokens=False)
    return prompt_of({**features, "input_ids": torch.tensor([ids])})


def _of_qwen(written: str, pictures: list[PIL.Image.Image]) -> tuple:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    values = {k: v for k, v in PROCESSOR.items() if k != "image_processor_type"}
    features = Qwen2VLImageProcessorPil(**values)(images=pictures, return_tensors="np")
    text, *rest = written.split("<|image_pad|>")
    for (_, height, width), after in zip(features["image_grid_thw"], rest, strict=True):
        text += "<|image_pad|>" * (height * width // MERGE**2) + after
    return text, features


def _of_gemma(written: str, pictures: list[PIL.Image.Image], folder: Path) -> dict:
    from lib.processors import gemma3

    return gemma3(folder)(
        images=pictures, text=written, add_special_tokens=False, return_tensors="pt"
    )


def _of_mistral(written: str, pictures: list[PIL.Image.Image]) -> tuple:
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    values = {k: v for k, v in MISTRAL_PROCESSOR.items() if k != "image_processor_type"}
    values["patch_size"] = side = PATCH * MERGE
    features = PixtralImageProcessorPil(**values)(images=pictures, return_tensors="np")
    text, *rest = written.split("[IMG]")
    for (height, width), after in zip(features["image_sizes"], rest, strict=True):
        rows = ["[IMG]" * (width // side)] * (height // side)
        text += "[IMG_BREAK]".join(rows) + "[IMG_END]" + after
    return text, features
