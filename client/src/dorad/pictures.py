"""Pictures of files in prompts, prepared by a model's own image processor.

Needs the extras `text` and `images`: transformers and Pillow. For `doractl` and the gateway; a
trainer has its own processor, and `dorad.images`.
"""

from __future__ import annotations

import io
import json
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dorad import types as t
from dorad.images import from_processor

if TYPE_CHECKING:
    from dorad.text import ModelText

FORMATS = ("PNG", "JPEG", "WEBP")
_MODEL_TYPES = ("qwen3_vl", "qwen3_5", "qwen2_5_vl", "mistral3")
# Mistral's tokens of text in an image; processor_config.json may name others.
_MARKS = {"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
# transformers 5 writes the second, with the image processor in it.
_FILES = ("preprocessor_config.json", "processor_config.json")


def _read_json(file: pathlib.Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


class _Qwen:
    """The tokens of an image follow each other. Its sizes are the image processor's own."""

    def __init__(self, processor: Any, config: Mapping[str, Any]) -> None:
        self.image_token_id = int(config["image_token_id"])
        self.options: dict[str, Any] = {}  # Of the image processor's call.
        self.sizes: dict[str, int] = {}  # For from_processor.
        self._merged = int(processor.merge_size) ** 2

    def tokens(self, features: Mapping[str, Any]) -> list[list[int]]:
        """Those of each image."""
        counts = [int(np.prod(grid)) // self._merged for grid in features["image_grid_thw"]]
        return [[self.image_token_id] * count for count in counts]


class _Mistral:
    """A token of text ends each row of an image, and another one the image: transformers has both
    in the processor that is for text and images, which needs torchvision."""

    def __init__(self, root: pathlib.Path, config: Mapping[str, Any]) -> None:
        # What config.json leaves out is transformers' default.
        self.image_token_id = int(config.get("image_token_index", 10))
        patch = int(config.get("vision_config", {}).get("patch_size", 16))
        merge = int(config.get("spatial_merge_size", 2))
        self.sizes = {"patch_size": patch, "merge_size": merge}
        self._cell = patch * merge
        self.options = {"patch_size": self._cell}
        file = root / "processor_config.json"
        values = _read_json(file) if file.is_file() else {}
        for name, value in (("patch_size", patch), ("spatial_merge_size", merge)):
            if values.get(name, value) != value:
                raise ValueError(f"{file}: {name} is {values[name]}, and {value} in config.json")
        file = root / "tokenizer.json"
        added = {token["content"]: token["id"] for token in _read_json(file)["added_tokens"]}
        names = [values.get(key, default) for key, default in _MARKS.items()]
        if missing := [name for name in names if name not in added]:
            raise ValueError(f"{file} has no token {missing[0]}")
        self._break, self._end = (int(added[name]) for name in names)

    def tokens(self, features: Mapping[str, Any]) -> list[list[int]]:
        """Those of each image."""
        found = []
        for height, width in np.asarray(features["image_sizes"]).tolist():
            row = [self.image_token_id] * (width // self._cell) + [self._break]
            found.append([*(row * (height // self._cell))[:-1], self._end])
        return found


class ModelPictures:
    """The image processor of one Hugging Face model folder. Thread-safe.

    Args:
      text: of the model's folder, which has config.json and preprocessor_config.json (or, of
        transformers 5, processor_config.json), of a model whose images dorad serves.

    Raises:
      ImportError: transformers or Pillow is missing.
      FileNotFoundError, ValueError: the folder has no processor, or that of another kind of model.
    """

    def __init__(self, text: ModelText) -> None:
        self._text, root = text, text.folder
        config = _read_json(root / "config.json")
        kind = config.get("model_type")
        if kind not in _MODEL_TYPES:
            raise ValueError(
                f"{root} holds a model of type {kind!r}: images are for {', '.join(_MODEL_TYPES)}"
            )
        if not any((root / name).is_file() for name in _FILES):
            raise FileNotFoundError(f"{root} has neither {' nor '.join(_FILES)}")
        try:
            import PIL.Image

            # transformers offers it as its own member with torchvision only; Pillow alone will do.
            from transformers.models.auto.image_processing_auto import AutoImageProcessor
        except ImportError as error:
            raise ImportError(f"{error}: pip install 'dorad[images]'") from error
        # The size of a picture is known before its pixels are: too many are an error, no warning.
        warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
        auto: Any = AutoImageProcessor
        try:
            self._processor = auto.from_pretrained(root, local_files_only=True)
        except OSError as error:
            raise ValueError(f"{root} has no image processor that can be read: {error}") from error
        self._family: _Qwen | _Mistral
        if kind == "mistral3":
            self._family = _Mistral(root, config)
        else:
            self._family = _Qwen(self._processor, config)

    def read(self, data: bytes) -> Any:
        """The picture of a file as transformers reads it: upright, RGB.

        Raises ValueError for what is no PNG, JPEG or WebP, is cut off, moves, or has more pixels
        than `PIL.Image.MAX_IMAGE_PIXELS`.
        """
        import PIL.Image
        import PIL.ImageOps

        try:
            with PIL.Image.open(io.BytesIO(data), formats=FORMATS) as picture:
                if getattr(picture, "n_frames", 1) > 1:
                    raise ValueError("the picture moves: videos are not served; send one frame")
                picture.load()
                return PIL.ImageOps.exif_transpose(picture).convert("RGB")
        except PIL.UnidentifiedImageError:
            raise ValueError("the data are no PNG, JPEG or WebP picture") from None
        except (PIL.Image.DecompressionBombWarning, PIL.Image.DecompressionBombError):
            most = PIL.Image.MAX_IMAGE_PIXELS
            raise ValueError(f"the picture has more than {most} pixels") from None
        except (OSError, SyntaxError, EOFError) as error:  # What Pillow's readers raise.
            raise ValueError(f"the picture cannot be read: {error}") from None

    def place(
        self, prompt: str, pictures: Sequence[Any], *, special_tokens: bool = False
    ) -> tuple[list[int], list[t.Image]]:
        """The token ids of a prompt with its pictures, and the images.

        Args:
          prompt: as the chat template writes it, with one place for each picture.
          special_tokens: the tokenizer adds its own.

        Raises ValueError when they do not fit, or the processor refuses a picture.
        """
        family = self._family
        token_ids = self._text.encode(prompt, special_tokens=special_tokens)
        placeholder = family.image_token_id
        places = token_ids.count(placeholder)
        if places != len(pictures):
            raise ValueError(
                f"the prompt has {places} placeholders for {len(pictures)} images: texts must not "
                "contain the model's placeholder, and its chat template must place every image"
            )
        if not pictures:
            return token_ids, []
        try:
            features = self._processor(images=list(pictures), return_tensors="np", **family.options)
        except ValueError as error:
            raise ValueError(f"the model's processor refuses a picture: {error}") from None
        left = iter(family.tokens(features))
        expanded: list[int] = []
        for token in token_ids:
            expanded += next(left) if token == placeholder else [token]
        inputs = {**features, "input_ids": expanded}
        ids, images = from_processor(inputs, placeholder, **family.sizes)
        return ids.tolist(), images
