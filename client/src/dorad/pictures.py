"""Pictures of files in prompts, prepared by a model's own image processor.

Needs the extra `images`: transformers and Pillow. For `doractl` and the gateway; a trainer has its
own processor, and `dorad.images`.
"""

from __future__ import annotations

import io
import json
import os
import pathlib
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from dorad import types as t
from dorad.images import from_processor

FORMATS = ("PNG", "JPEG", "WEBP")
_MODEL_TYPES = ("qwen3_vl", "qwen2_5_vl")
# transformers 5 writes the second, with the image processor in it.
_FILES = ("preprocessor_config.json", "processor_config.json")


class ModelPictures:
    """The image processor of one Hugging Face model folder. Thread-safe.

    Args:
      folder: has config.json and preprocessor_config.json (or, of transformers 5,
        processor_config.json), of a model whose images dorad serves.

    Raises:
      ImportError: transformers or Pillow is missing.
      FileNotFoundError, ValueError: the folder has no processor, or that of another kind of model.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        root = pathlib.Path(folder)
        config = json.loads((root / "config.json").read_text(encoding="utf-8"))
        kind = config.get("model_type")
        if kind not in _MODEL_TYPES:
            raise ValueError(
                f"{root} holds a model of type {kind!r}: images are for {', '.join(_MODEL_TYPES)}"
            )
        self.image_token_id = int(config["image_token_id"])
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
        self, token_ids: Sequence[int], pictures: Sequence[Any]
    ) -> tuple[list[int], list[t.Image]]:
        """The prompt with as many placeholders as each picture has tokens, and the images.

        Args:
          token_ids: of the chat template, with one placeholder for each picture.

        Raises ValueError when they do not fit, or the processor refuses a picture.
        """
        places = sum(token == self.image_token_id for token in token_ids)
        if places != len(pictures):
            raise ValueError(
                f"the prompt has {places} placeholders for {len(pictures)} images: texts must not "
                "contain the model's placeholder, and its chat template must place every image"
            )
        if not pictures:
            return list(token_ids), []
        features = self._processor(images=list(pictures), return_tensors="np")
        merged = int(self._processor.merge_size) ** 2
        counts = [int(np.prod(grid)) // merged for grid in features["image_grid_thw"]]
        left = iter(counts)
        expanded: list[int] = []
        for token in token_ids:
            expanded += [token] * (next(left) if token == self.image_token_id else 1)
        ids, images = from_processor({**features, "input_ids": expanded}, self.image_token_id)
        return ids.tolist(), images
