"""Images of chats: `image_url` parts become what the model's own processor makes of them."""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from dorad import types as t
from dorad.gateway.errors import Refusal
from dorad.gateway.files import open_below
from dorad.pictures import ModelPictures
from dorad.text import ModelText

_AT_ONCE = 4  # Prompts whose pictures are read at the same time: a picture may take 360 MB.
_FILE_BYTES = 64 << 20
_DATA = re.compile(r"data:image/(?:png|jpeg|jpg|webp);base64,", re.IGNORECASE)
_SHOWN = 60  # Characters of a URL in an error.


def urls_of(messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The URL of each image of a conversation, by its field."""
    found = {}
    for i, message in enumerate(messages):
        content = message.get("content")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if part["type"] == "image_url":
                url = part["image_url"]
                field = f"messages[{i}].content[{j}].image_url"
                found[field] = url if isinstance(url, str) else url["url"]
    return found


class Images:
    """Reads images for prompts. Use it from one event loop.

    Args:
      text: the model's tokenizer; None: the gateway has none.
      roots: files are read below these folders only.
    """

    def __init__(self, text: ModelText | None, roots: Sequence[Path] = ()) -> None:
        self._text = text
        self._roots = [Path(os.path.realpath(root)) for root in roots]
        # Their own: one whose caller is gone still counts until it ends.
        self._threads = ThreadPoolExecutor(_AT_ONCE, "images")
        self._loading = asyncio.Lock()
        self._pictures: ModelPictures | None = None

    @staticmethod
    def check(urls: Mapping[str, str], limits: t.Limits) -> None:
        """Raises Refusal for more images than the server takes."""
        first = next(iter(urls))
        if limits.max_images == 0:
            message = "this server takes no images: send text"
            raise Refusal(400, "IMAGE_UNSUPPORTED", message, param=first)
        if len(urls) > limits.max_images:
            message = (
                f"{len(urls)} images are more than the server's {limits.max_images} of a prompt "
                "(limits.max_images)"
            )
            raise Refusal(400, "IMAGES_TOO_MANY", message, param=first)

    async def place(
        self, prompt: str, urls: Mapping[str, str], limits: t.Limits, *, special_tokens: bool
    ) -> tuple[list[int], list[t.Image]]:
        """The token ids of a chat template's text with its images, and the images. Raises
        Refusal."""
        pictures = await self._loaded()

        def run() -> tuple[list[int], list[t.Image]]:
            read = [self._read(pictures, field, url) for field, url in urls.items()]
            try:
                ids, images = pictures.place(prompt, read, special_tokens=special_tokens)
            except ValueError as error:
                raise Refusal(400, "IMAGE_INVALID", str(error), param="messages") from None
            for field, image in zip(urls, images, strict=True):
                if image.length > limits.max_image_tokens:
                    message = (
                        f"{field}: the image has {image.length} tokens, more than the server's "
                        f"{limits.max_image_tokens} (limits.max_image_tokens): send a smaller one"
                    )
                    raise Refusal(400, "IMAGE_TOO_LARGE", message, param=field)
            return ids, images

        return await asyncio.get_running_loop().run_in_executor(self._threads, run)

    async def _loaded(self) -> ModelPictures:
        """The processor: it is slow to load, and gateways for text do without."""
        async with self._loading:
            if self._pictures is None:
                assert self._text is not None  # Chats need a tokenizer.
                try:
                    self._pictures = await asyncio.to_thread(ModelPictures, self._text)
                except (ImportError, OSError, ValueError, KeyError) as error:
                    message = f"this gateway cannot read images: {error}"
                    raise Refusal(400, "IMAGES_NOT_CONFIGURED", message, param="messages") from None
            return self._pictures

    def _read(self, pictures: ModelPictures, field: str, url: str) -> Any:
        """The picture of a URL. Raises Refusal. For threads: it takes time."""
        try:
            return pictures.read(self._bytes(field, url))
        except ValueError as error:
            raise Refusal(400, "IMAGE_INVALID", f"{field}: {error}", param=field) from None

    def _bytes(self, field: str, url: str) -> bytes:
        scheme = url[:_SHOWN].partition(":")[0].lower()
        if scheme == "data":
            head = _DATA.match(url)
            if head is None:
                raise ValueError(
                    "a data URL of an image begins with data:image/png;base64, (or jpeg, webp), "
                    f"not {url.partition(',')[0][:_SHOWN]!r}"
                )
            try:
                return base64.b64decode(url[head.end() :], validate=True)
            except (binascii.Error, ValueError) as error:
                raise ValueError(f"the data URL is not base64: {error}") from None
        if scheme == "file":
            return self._file(field, url)
        if scheme in ("http", "https"):
            message = (
                f"{field}: {scheme} URLs are not fetched: a gateway would reach hosts for its "
                "callers that they cannot reach themselves; send the picture as a data URL"
            )
        else:
            message = f"{field}: neither a data nor a file URL: {url[:_SHOWN]!r}"
        raise Refusal(400, "IMAGE_URL_UNSUPPORTED", message, param=field)

    def _file(self, field: str, url: str) -> bytes:
        if not self._roots:
            message = f"{field}: this gateway reads no files: it has no --image-root"
            raise Refusal(403, "PATH_NOT_ALLOWED", message, param=field)
        split = urlsplit(url)
        path = unquote(split.path)
        if split.netloc not in ("", "localhost") or split.query or split.fragment:
            raise ValueError(f"a file's URL is file:///PATH, not {url[:_SHOWN]!r}")
        if not os.path.isabs(path) or "\0" in path or len(os.fsencode(path)) > 4095:
            raise ValueError(f"the URL has no absolute path: {url[:_SHOWN]!r}")
        real = Path(os.path.realpath(path))  # Links resolved, also of what is not there.
        root = next((root for root in self._roots if real.is_relative_to(root)), None)
        try:
            if root is None:
                raise PermissionError
            descriptor = open_below(root, real)
        except PermissionError:
            message = f"{field}: {path!r} does not lie below one of the gateway's --image-root"
            raise Refusal(403, "PATH_NOT_ALLOWED", message, param=field) from None
        except FileNotFoundError:
            message = f"{field}: there is no file {path!r} that the gateway can read"
            raise Refusal(404, "FILE_NOT_FOUND", message, param=field) from None
        with open(descriptor, "rb") as file:
            data = file.read(_FILE_BYTES + 1)
        if len(data) > _FILE_BYTES:
            message = f"{field}: the file has more than {_FILE_BYTES} bytes"
            raise Refusal(400, "FILE_TOO_LARGE", message, param=field)
        return data
