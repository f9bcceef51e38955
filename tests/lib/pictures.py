"""Images for tests, as a processor of Qwen3-VL makes them: random patches, no picture."""

import dorad
import torch

from lib.tiny_models import IMAGE

MERGE = 2
# Of the tiny tower: 3 channels x 2 frames x 2 x 2 pixels.
ELEMENTS = 24
START, END = 1, 0


def picture(seed: int, height: int, width: int, dtype: torch.dtype = torch.float32):
    """Patches [height * width, elements] and their grid."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(height * width, ELEMENTS, generator=generator)
    return pixels.to(dtype), (1, height, width)


def inputs_of(parts: list) -> dict[str, torch.Tensor]:
    """A processor's result for a prompt: token ids, with pictures in between."""
    ids, pixels, grids = [], [], []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
            continue
        values, (_, height, width) = part
        ids += [START, *[IMAGE] * (height * width // MERGE**2), END]
        pixels.append(values)
        grids.append([1, height, width])
    inputs = {"input_ids": torch.tensor([ids])}
    if pixels:
        inputs["pixel_values"] = torch.cat(pixels)
        inputs["image_grid_thw"] = torch.tensor(grids)
    return inputs


def for_oracle(inputs: dict[str, torch.Tensor], tokens: list[int]) -> dict[str, torch.Tensor]:
    """The same prompt with tokens after it. Without images transformers takes the ids alone."""
    ids = torch.cat([inputs["input_ids"], torch.tensor([tokens], dtype=torch.long)], dim=1)
    values = {**inputs, "input_ids": ids}
    if "pixel_values" in inputs:
        values["mm_token_type_ids"] = (ids == IMAGE).int()
    return values


def prompt_of(inputs: dict[str, torch.Tensor]) -> tuple[list[int], list[dorad.Image]]:
    ids, images = dorad.images.from_processor(inputs, IMAGE)
    return [int(i) for i in ids], images
