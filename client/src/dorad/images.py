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

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """An image in the place of `length` placeholders, from the token `offset` on."""

    offset: int
    length: int
    grid: tuple[int, int, int]
    """Time (1), height and width in patches: a row of the processor's image_grid_thw."""
    pixels: Any = None
    """The image's rows of pixel_values, [patches, elements]: an array or a CPU tensor of float32,
    float16 or bfloat16. None: the server has them, from an earlier request; `sha256` names them."""
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
        raise TypeError(f"pixels must be float32, float16 or bfloat16, not {shown(pixels)}")
    if hasattr(pixels, "detach"):  # a torch tensor; numpy has no bfloat16
        import torch

        pixels = pixels.detach().cpu().contiguous().view(torch.uint8).numpy()
    return dtype, np.ascontiguousarray(pixels).tobytes()


def from_processor(
    inputs: Mapping[str, Any], image_token_id: int
) -> tuple[npt.NDArray[np.int32], list[Image]]:
    """The token ids and images of one prompt.

    Args:
      inputs: the processor's result for one prompt: input_ids [1, tokens] or [tokens], and, if it
        has images, pixel_values [patches, elements] and image_grid_thw [images, 3].
      image_token_id: the placeholder, `processor.image_token_id`.

    Raises:
      ValueError: the placeholders do not fit the grids.
    """
    ids = np.asarray(inputs["input_ids"]).reshape(-1).astype(np.int32)
    if inputs.get("pixel_values") is None:
        return ids, []
    grids = [(int(t), int(h), int(w)) for t, h, w in np.asarray(inputs["image_grid_thw"])]
    patches = [time * height * width for time, height, width in grids]
    places = np.flatnonzero(ids == image_token_id)
    merged = sum(patches) // max(len(places), 1)  # patches of a token
    if merged == 0 or sum(patches) != merged * len(places):
        raise ValueError(
            f"{len(places)} placeholders {image_token_id} do not fit images of {patches} patches"
        )
    images, place, row = [], 0, 0
    for grid, count in zip(grids, patches, strict=True):
        pixels = inputs["pixel_values"][row : row + count]
        images.append(Image(int(places[place]), count // merged, grid, pixels))
        place, row = place + count // merged, row + count
    return ids, images
