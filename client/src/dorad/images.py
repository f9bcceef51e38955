"""Images in prompts, as a model's own processor prepares them.

The processor (transformers: `AutoProcessor`) makes token ids with one placeholder for each of an
image's tokens, and patches of pixels; `from_processor` turns both into what `generate` and `score`
take. Nothing here decodes or resizes an image.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dorad._arguments import shown

DTYPES = ("float32", "float16", "bfloat16", "uint8")
Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """An image in the place of `length` placeholders, from the token `offset` on."""

    offset: int
    length: int
    grid: Grid
    """Time (1), height and width in patches: a row of the processor's image_grid_thw."""
    pixels: Any = None
    """The image's rows of pixel_values, [patches, elements]: an array or a CPU tensor of float32,
    float16 or bfloat16, or of uint8: of a processor that has neither rescaled nor normalized them,
    which the server does. None: the server has them, from an earlier request; `sha256` names
    them."""
    dtype: str = ""
    """Of the pixels; needed without them."""
    sha256: bytes = b""
    """Of the pixels' bytes; default: computed."""
    data: bytes = field(init=False, repr=False, default=b"")
    """The pixels' bytes; empty without pixels."""

    def __post_init__(self) -> None:
        if self.pixels is None:
            if not self.sha256 or self.dtype not in DTYPES:
                raise ValueError("an image without pixels needs sha256 and dtype")
            return
        dtype, data = _bytes_of(self.pixels)
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "data", data)
        object.__setattr__(self, "sha256", hashlib.sha256(data).digest())

    def without_pixels(self) -> Image:
        """The same image by its digest: for a server that has it."""
        return Image(self.offset, self.length, self.grid, dtype=self.dtype, sha256=self.sha256)


def _bytes_of(pixels: Any) -> tuple[str, bytes]:
    dtype = str(getattr(pixels, "dtype", "")).removeprefix("torch.")
    if dtype not in DTYPES:
        raise TypeError(f"pixels must be one of {', '.join(DTYPES)}, not {shown(pixels)}")
    if hasattr(pixels, "detach"):  # a torch tensor; numpy has no bfloat16
        import torch

        pixels = pixels.detach().cpu().contiguous().view(torch.uint8).numpy()
    return dtype, np.ascontiguousarray(pixels).tobytes()


def _split(inputs: Mapping[str, Any]) -> list[tuple[Grid, Any]]:
    """Grid and patches of each image, of patches that follow each other."""
    images, row = [], 0
    for time, height, width in np.asarray(inputs["image_grid_thw"]).tolist():
        end = row + time * height * width
        images.append(((time, height, width), inputs["pixel_values"][row:end]))
        row = end
    return images


def _cut(inputs: Mapping[str, Any], patch: int, merge: int) -> list[tuple[Grid, Any]]:
    """Grid and patches of each image; of Mistral's, images are padded to one size."""
    if patch < 1 or merge < 1:
        raise ValueError("images of this processor need patch_size and merge_size")
    images, cell = [], patch * merge
    sizes = inputs.get("image_sizes")
    if sizes is None:
        sizes = [image.shape[-2:] for image in inputs["pixel_values"]]
    sizes = np.asarray(sizes).tolist()
    for (height, width), image in zip(sizes, inputs["pixel_values"], strict=True):
        if height % cell or width % cell:
            raise ValueError(f"{height} x {width} pixels are no tokens of {cell} x {cell}")
        rows, columns = height // cell, width // cell
        pixels = image[:, :height, :width].reshape(-1, rows, merge, patch, columns, merge, patch)
        order = (1, 4, 2, 5, 0, 3, 6)  # the patches of a token follow each other
        pixels = pixels.permute(order) if hasattr(pixels, "permute") else pixels.transpose(order)
        patches = pixels.reshape(rows * columns * merge**2, -1)
        images.append(((1, rows * merge, columns * merge), patches))
    return images


def from_processor(
    inputs: Mapping[str, Any], image_token_id: int, *, patch_size: int = 0, merge_size: int = 0
) -> tuple[npt.NDArray[np.int32], list[Image]]:
    """The token ids and images of one prompt.

    Args:
      inputs: the processor's result for one prompt: input_ids [1, tokens] or [tokens], and, if it
        has images, pixel_values [patches, elements] and image_grid_thw [images, 3]; of Mistral's
        processor pixel_values [images, channels, height, width] and image_sizes [images, 2]; of
        Gemma's the former alone.
      image_token_id: the placeholder, the model's `config.image_token_id`. Gemma's
        `processor.image_token_id` is another: a chat template's.
      patch_size, merge_size: `processor.patch_size` and `processor.spatial_merge_size` of
        Mistral's processor, which leaves the cutting into patches to the model, as Gemma's does:
        14 and 4.

    Raises:
      ValueError: the placeholders do not fit the images.
    """
    ids = np.asarray(inputs["input_ids"]).reshape(-1).astype(np.int32)
    if inputs.get("pixel_values") is None:
        return ids, []
    if inputs.get("image_grid_thw") is not None:
        parts, merged = _split(inputs), 0
    else:
        parts, merged = _cut(inputs, patch_size, merge_size), merge_size**2
    patches = [time * height * width for (time, height, width), _ in parts]
    places = np.flatnonzero(ids == image_token_id)
    merged = merged or sum(patches) // max(len(places), 1)  # patches of a token
    fits = merged > 0 and sum(patches) == merged * len(places)
    if not fits or any(count % merged for count in patches):
        raise ValueError(
            f"{len(places)} placeholders {image_token_id} do not fit images of {patches} patches"
        )
    images, place = [], 0
    for (grid, pixels), count in zip(parts, patches, strict=True):
        images.append(Image(int(places[place]), count // merged, grid, pixels))
        place += count // merged
    return ids, images
