"""Adapter uploads: a PEFT folder or tensors in memory, as one safetensors image in chunks.

Tensors are sent straight from their own memory; no second copy of the image is made (tensors on an
accelerator are first copied to the host).
"""

from __future__ import annotations

import enum
import hashlib
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from dorad._channel import CHUNK_BYTES
from dorad._stubs import adapters_pb2

Progress = Callable[[int, int], None]
"""Called as progress(bytes sent, bytes in all) while an upload runs."""

_CONFIG_FILE = "adapter_config.json"
_TENSORS_FILE = "adapter_model.safetensors"


class Image(Protocol):
    """A safetensors image that can be read from the start more than once."""

    size: int

    def pieces(self) -> Iterator[memoryview]:
        """Consecutive parts of the image, each at most CHUNK_BYTES."""


class FileImage:
    """An image on disk."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self.size = path.stat().st_size

    def pieces(self) -> Iterator[memoryview]:
        with self._path.open("rb") as file:
            while data := file.read(CHUNK_BYTES):
                yield memoryview(data)


class TensorImage:
    """An image made of tensors in memory: header first, then each tensor's bytes."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        if not tensors:
            raise ValueError("tensors is empty")
        parts = [(name, *_tensor_bytes(name, tensor)) for name, tensor in tensors.items()]
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, dtype, shape, data in parts:
            end = offset + data.nbytes
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # The format asks for 8-byte aligned data.
        self._views = [memoryview(len(text).to_bytes(8, "little") + text)]
        self._views += [data for _, _, _, data in parts]
        self.size = sum(view.nbytes for view in self._views)

    def pieces(self) -> Iterator[memoryview]:
        for view in self._views:
            for start in range(0, view.nbytes, CHUNK_BYTES):
                yield view[start : start + CHUNK_BYTES]


_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
}


def _tensor_bytes(name: str, tensor: Any) -> tuple[str, list[int], memoryview]:
    """(safetensors dtype, shape, bytes) of a torch tensor or numpy array."""
    shape = [int(size) for size in tensor.shape]
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise TypeError(f"tensor {name!r} has dtype {dtype}; adapters are {', '.join(_DTYPES)}")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        array = flat.view(torch.uint8).numpy()
    else:
        array = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    return _DTYPES[dtype], shape, memoryview(array)


def _plain(value: Any) -> Any:
    """JSON form of what PEFT keeps in a configuration object."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"cannot write {type(value).__name__} into adapter_config.json")


def config_json(config: Any) -> str:
    """adapter_config.json of a mapping, a JSON string, or an object with to_dict() (PEFT's)."""
    if isinstance(config, str):
        return config
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise TypeError(f"config must be a mapping or a PEFT config, not {type(config).__name__}")
    return json.dumps(dict(config), default=_plain)


def _from_folder(path: str | os.PathLike[str]) -> tuple[str, Image]:
    folder = pathlib.Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"no adapter folder {folder}")
    for name in (_CONFIG_FILE, _TENSORS_FILE):
        if not (folder / name).is_file():
            hint = ""
            if name == _TENSORS_FILE and (folder / "adapter_model.bin").is_file():
                hint = " (adapter_model.bin is a pickle: save with safe_serialization=True)"
            raise FileNotFoundError(f"{folder} has no {name}{hint}")
    config = (folder / _CONFIG_FILE).read_text(encoding="utf-8")
    return config, FileImage(folder / _TENSORS_FILE)


class Upload:
    """One Publish stream: Begin, chunks in order, Commit. Iterate once."""

    def __init__(
        self,
        name: str,
        *,
        path: str | os.PathLike[str] | None,
        tensors: Mapping[str, Any] | None,
        config: Any,
        activate: bool,
        version: int | None,
        expected_generation: int | None,
        durable: bool,
        tags: Mapping[str, str] | None,
        progress: Progress | None,
    ) -> None:
        if (path is None) == (tensors is None):
            raise ValueError("publish needs exactly one of path and tensors")
        self._image: Image
        if path is not None:
            text, self._image = _from_folder(path)
            text = text if config is None else config_json(config)
        else:
            assert tensors is not None
            if config is None:
                raise ValueError("publish with tensors needs config")
            text, self._image = config_json(config), TensorImage(tensors)
        self._progress = progress
        self._begin = adapters_pb2.PublishBegin(
            name=name,
            version=version,
            adapter_config_json=text,
            safetensors_size=self._image.size,
            activate=activate,
            expected_generation=expected_generation,
            durable=durable,
            tags=tags,
        )
        self.failure: BaseException | None = None
        """What stopped the upload on this side: gRPC itself only says that iterating failed."""

    @property
    def size(self) -> int:
        """Bytes of the image."""
        return self._image.size

    def __iter__(self) -> Iterator[adapters_pb2.PublishRequest]:
        try:
            yield from self._messages()
        except Exception as error:
            self.failure = error
            raise

    def _messages(self) -> Iterator[adapters_pb2.PublishRequest]:
        digest = hashlib.sha256()
        for piece in self._image.pieces():
            digest.update(piece)
        self._begin.safetensors_sha256 = digest.digest()
        yield adapters_pb2.PublishRequest(begin=self._begin)
        offset = 0
        for piece in self._image.pieces():
            chunk = adapters_pb2.PublishChunk(offset=offset, data=bytes(piece))
            yield adapters_pb2.PublishRequest(chunk=chunk)
            offset += piece.nbytes
            if self._progress is not None:
                self._progress(offset, self.size)
        yield adapters_pb2.PublishRequest(commit=adapters_pb2.PublishCommit())
