"""Images of prompts that a trainer's own processor has tokenized: for TRL and verl."""

from __future__ import annotations

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from dorad.images import Image, from_processor

_ORIENTATION = 0x0112  # EXIF's


def sizes_of(config: Mapping[str, Any]) -> dict[str, int]:
    """The sizes for `from_processor`: Mistral's and Gemma's processors leave the cutting into
    patches to the model.

    Args:
      config: of config.json. What it leaves out is transformers' default.
    """
    kind, vision = config.get("model_type"), config.get("vision_config") or {}
    patch = int(vision.get("patch_size", 16))
    if kind == "mistral3":
        return {"patch_size": patch, "merge_size": int(config.get("spatial_merge_size", 2))}
    if kind == "gemma3":
        tokens = math.isqrt(int(config.get("mm_tokens_per_image", 256)))  # on a side
        return {
            "patch_size": patch,
            "merge_size": int(vision.get("image_size", 224)) // patch // tokens,
        }
    return {}


def placed(
    processor: Any, config: Any, token_ids: Sequence[int], pictures: Sequence[Any], **options: Any
) -> list[Image]:
    """The images of a prompt, with the pixels that the trainer's model gets.

    Args:
      processor: of transformers, for texts and images.
      config: transformers' of the model.
      token_ids: of the prompt, with all placeholders of each image.
      pictures: in the order of their places, as the processor takes them.
      options: of the processor's call.

    Raises ValueError when the placeholders do not fit the pictures.
    """
    # With Gemma a text's token and those of the image in its place differ.
    place = getattr(processor, "boi_token", processor.image_token)
    text = place * len(pictures)
    inputs = processor(images=list(pictures), text=text, return_tensors="pt", **options)
    _, images = from_processor(
        {**inputs, "input_ids": token_ids}, config.image_token_id, **sizes_of(config.to_dict())
    )
    return images


class Placed:
    """As `placed`, once for equal prompts that come shortly after each other. Thread-safe."""

    MOST = 32
    """Prompts whose images are remembered."""

    def __init__(self, processor: Any, config: Any) -> None:
        self._processor, self._config = processor, config
        self._lock = threading.Lock()
        self._found: OrderedDict[Hashable, Future[list[Image]]] = OrderedDict()

    def __call__(
        self, token_ids: Sequence[int], pictures: Sequence[Any], **options: Any
    ) -> list[Image]:
        key = tuple(token_ids), tuple(map(identity, pictures)), repr(sorted(options.items()))
        with self._lock:
            found = self._found.get(key)
            mine = Future[list[Image]]() if found is None else None
            if mine is not None:
                self._found[key] = mine
                if len(self._found) > self.MOST:
                    self._found.popitem(last=False)
        if found is not None:
            return found.result()
        assert mine is not None
        try:
            mine.set_result(placed(self._processor, self._config, token_ids, pictures, **options))
        except BaseException as error:
            mine.set_exception(error)
        return mine.result()


def identity(picture: Any) -> Hashable:
    """Equal for pictures of which processors make the same."""
    if not hasattr(picture, "convert"):  # no picture of PIL
        return id(picture)
    upright = picture.convert("RGB")
    digest = hashlib.blake2b(upright.tobytes()).digest()
    return upright.size, digest, picture.getexif().get(_ORIENTATION)


def unsampled(config: Any) -> list[list[int]]:
    """Tokens that no sample may have, as `bad_words`: a model fails on a placeholder without its
    image.

    Args:
      config: transformers' of the model.
    """
    found = [getattr(config, name, None) for name in ("image_token_id", "video_token_id")]
    return [[int(token)] for token in found if token is not None]
