"""Images for tests, as the families' processors make them: random patches, no picture."""

from dataclasses import dataclass

import dorad
import torch

from lib.tiny_models import IMAGE

# Those whose images are served.
FAMILIES = ["qwen3_vl", "qwen25_vl", "mistral3"]

# Of the tiny towers: pixels on a side of a patch, and patches on a side of a token.
PATCH, MERGE = 2, 2
# 3 channels x 2 frames x 2 x 2 pixels, with Qwen.
ELEMENTS = 24
START, END = 1, 0
# With Mistral: between the rows of an image.
BREAK = 2


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
    of_mistral = family.startswith("mistral3")
    ids: list[int] = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
        elif of_mistral:
            row = [*[IMAGE] * (part.width // MERGE), BREAK]
            ids += [*(row * (part.height // MERGE))[:-1], END]
        else:
            ids += [START, *[IMAGE] * (part.height * part.width // MERGE**2), END]
    inputs = {"input_ids": torch.tensor([ids])}
    pictures = [part for part in parts if isinstance(part, Picture)]
    if pictures:
        inputs |= _padded(pictures) if of_mistral else _patches(pictures)
    return inputs


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
    return values


def prompt_of(inputs: dict[str, torch.Tensor]) -> tuple[list[int], list[dorad.Image]]:
    ids, images = dorad.images.from_processor(inputs, IMAGE, patch_size=PATCH, merge_size=MERGE)
    return [int(i) for i in ids], images
