"""Pictures of files in prompts, prepared by a model's own image processor.

Needs the extras `text` and `images`: transformers and Pillow. For `doractl` and the gateway; a
trainer has its own processor, and `dorad.images`.
"""

from __future__ import annotations

import abc
import io
import json
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dorad import types as t
from dorad._processor_images import sizes_of
from dorad.images import from_processor

if TYPE_CHECKING:
    from dorad.text import ModelText

FORMATS = ("PNG", "JPEG", "WEBP")
_MODEL_TYPES = ("qwen3_vl", "qwen3_5", "qwen2_5_vl", "mistral3", "gemma3")
# Mistral's tokens of text in an image; processor_config.json may name others.
_MARKS = {"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
# Gemma's, by their names in tokenizer_config.json: transformers' default in config.json.
_GEMMA_TOKENS = {"boi_token": 255_999, "eoi_token": 256_000, "image_token": 262_144}
# transformers 5 writes the second, with the image processor in it.
_FILES = ("preprocessor_config.json", "processor_config.json")


def _read_json(file: pathlib.Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _optional(file: pathlib.Path) -> dict[str, Any]:
    return _read_json(file) if file.is_file() else {}


def _check_equal(
    file: pathlib.Path, values: Mapping[str, Any], expected: Mapping[str, int]
) -> None:
    """Raises ValueError for a value that config.json has otherwise."""
    for name, value in expected.items():
        if values.get(name, value) != value:
            raise ValueError(f"{file}: {name} is {values[name]}, and {value} in config.json")


def _added_tokens(root: pathlib.Path) -> dict[str, int]:
    tokens = _read_json(root / "tokenizer.json")["added_tokens"]
    return {token["content"]: int(token["id"]) for token in tokens}


class _Family(abc.ABC):
    """How a family's processor writes images into a prompt."""

    image_token_id: int
    """In a prompt's tokens: one for each image, which `tokens` replace."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.options: dict[str, Any] = {}  # Of the image processor's call.
        self.sizes = sizes_of(config)  # For from_processor.

    def written(self, prompt: str) -> str:
        """The chat template's text, with what stands around an image's tokens."""
        return prompt

    @abc.abstractmethod
    def tokens(self, features: Mapping[str, Any]) -> list[list[int]]:
        """Those of each image."""


class _Qwen(_Family):
    """The tokens of an image follow each other. Its sizes are the image processor's own."""

    def __init__(self, processor: Any, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.image_token_id = int(config["image_token_id"])
        self._merged = int(processor.merge_size) ** 2

    def tokens(self, features: Mapping[str, Any]) -> list[list[int]]:
        counts = [int(np.prod(grid)) // self._merged for grid in features["image_grid_thw"]]
        return [[self.image_token_id] * count for count in counts]


class _Mistral(_Family):
    """A token of text ends each row of an image, and another one the image: transformers has both
    in the processor that is for text and images, which needs torchvision."""

    def __init__(self, root: pathlib.Path, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        # What config.json leaves out is transformers' default.
        self.image_token_id = int(config.get("image_token_index", 10))
        patch, merge = self.sizes["patch_size"], self.sizes["merge_size"]
        self._cell = patch * merge
        self.options = {"patch_size": self._cell}
        file = root / "processor_config.json"
        values = _optional(file)
        _check_equal(file, values, {"patch_size": patch, "spatial_merge_size": merge})
        added = _added_tokens(root)
        names = [values.get(key, default) for key, default in _MARKS.items()]
        if missing := [name for name in names if name not in added]:
            raise ValueError(f"{root / 'tokenizer.json'} has no token {missing[0]}")
        self._break, self._end = (added[name] for name in names)

    def tokens(self, features: Mapping[str, Any]) -> list[list[int]]:
        found = []
        for height, width in np.asarray(features["image_sizes"]).tolist():
            row = [self.image_token_id] * (width // self._cell) + [self._break]
            found.append([*(row * (height // self._cell))[:-1], self._end])
        return found


class _Gemma(_Family):
    """Newlines surround an image: a tokenizer makes one token of them and of the text's. All images
    have one size."""

    def __init__(self, root: pathlib.Path, processor: Any, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        if getattr(processor, "do_pan_and_scan", False):
            raise ValueError(f"{root}: do_pan_and_scan is on, and crops of images are not served")
        side = int((config.get("vision_config") or {}).get("image_size", 224))
        height, width = processor.size["height"], processor.size["width"]
        if (height, width) != (side, side):
            raise ValueError(
                f"{root}: the image processor makes {height} x {width} pixels, and image_size is "
                f"{side} in config.json"
            )
        self._length = int(config.get("mm_tokens_per_image", 256))
        file = root / "processor_config.json"
        _check_equal(file, _optional(file), {"image_seq_length": self._length})
        named = _optional(root / "tokenizer_config.json")
        extra = named.get("extra_special_tokens")  # Older folders have them here, too.
        named = {**named, **(extra if isinstance(extra, dict) else {})}
        added = _added_tokens(root)
        for name, default in _GEMMA_TOKENS.items():
            token_id = config.get(f"{name}_index", default)
            if added.get(str(named.get(name))) != token_id:
                raise ValueError(
                    f"{root}: {name} of tokenizer_config.json is {named.get(name)!r}, which is not "
                    f"the token {token_id} of config.json"
                )
        self.image_token_id = added[named["image_token"]]
        self._place = named["boi_token"]
        self._image = "\n\n{boi_token}{image_token}{eoi_token}\n\n".format_map(named)

    def written(self, prompt: str) -> str:
        return prompt.replace(self._place, self._image)

    def tokens(self, features: Mapping[str, Any]) -> list[list[int]]:
        return [[self.image_token_id] * self._length for _ in features["pixel_values"]]


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
        self._family: _Family
        if kind == "mistral3":
            self._family = _Mistral(root, config)
        elif kind == "gemma3":
            self._family = _Gemma(root, self._processor, config)
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
        token_ids = self._text.encode(family.written(prompt), special_tokens=special_tokens)
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
