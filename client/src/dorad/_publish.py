"""Adapter uploads: a PEFT folder or tensors in memory, as one safetensors file in chunks.

Tensors are sent from their own memory, without a second copy (tensors on an accelerator are first
copied to the host).

A broken upload is resumed: it has an id, under which the server keeps the received bytes and, after
the commit, the result. Sending Begin again is therefore safe, even if only the answer was lost.
"""

from __future__ import annotations

import copy
import enum
import hashlib
import json
import os
import pathlib
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from dorad._arguments import filled
from dorad._channel import CHUNK_BYTES
from dorad._stubs import adapters_pb2

Progress = Callable[[int, int], None]
"""Called as progress(bytes sent, bytes in all) while an upload runs."""

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"


class Image(Protocol):
    """The bytes of a safetensors file; can be read more than once."""

    size: int

    def pieces(self, offset: int = 0) -> Iterator[memoryview]:
        """Consecutive parts of the file from `offset` on, each at most CHUNK_BYTES."""


class FileImage:
    """A file on disk."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self.size = path.stat().st_size

    def pieces(self, offset: int = 0) -> Iterator[memoryview]:
        with self._path.open("rb") as file:
            file.seek(offset)
            while data := file.read(CHUNK_BYTES):
                yield memoryview(data)


class TensorImage:
    """A file made of tensors in memory: header first, then each tensor's bytes."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        if not tensors:
            raise ValueError("tensors is empty")
        parts = [(name, *tensor_bytes(name, tensor)) for name, tensor in tensors.items()]
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

    def pieces(self, offset: int = 0) -> Iterator[memoryview]:
        for view in self._views:
            for start in range(offset, view.nbytes, CHUNK_BYTES):
                yield view[start : start + CHUNK_BYTES]
            offset = max(0, offset - view.nbytes)


_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
}


def tensor_bytes(name: str, tensor: Any) -> tuple[str, list[int], memoryview]:
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
    """JSON form of values in PEFT's configuration objects."""
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


_COMPILED = "_orig_mod"  # torch.compile's name for the module inside its wrapper


def _unwrapped(model: Any) -> Any:
    """The model inside the wrappers of torch.compile, DistributedDataParallel and DataParallel."""
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    while True:
        if isinstance(model, (DataParallel, DistributedDataParallel)):
            model = model.module
        elif hasattr(model, _COMPILED):
            model = getattr(model, _COMPILED)
        else:
            return model


def from_peft_model(model: Any, adapter: str | None) -> tuple[Mapping[str, Any], Any]:
    """(tensors, config) of one adapter of a peft.PeftModel, as its save_pretrained writes them.

    `adapter` is PEFT's name for it; None means the active one. The tensors are the model's own
    memory, no copies. Wrappers of torch.compile and of data parallelism are taken off.
    """
    from peft import PeftModel, get_peft_model_state_dict  # Slow, and an optional dependency.

    from dorad._adapter_tensors import is_sharded

    model = _unwrapped(model)
    if is_sharded(model):
        raise ValueError(
            "the model's parameters are in shards: publish "
            "tensors=dorad.train.adapter_tensors(model), which every process must call, and config"
        )
    if not isinstance(model, PeftModel):
        raise TypeError(f"model must be a peft.PeftModel, not {type(model).__name__}")
    if adapter is None:
        active = list(model.active_adapters)
        if len(active) != 1:
            raise ValueError(f"name one of the model's adapters: active are {active}")
        (adapter,) = active
    if adapter not in model.peft_config:
        raise ValueError(f"the model has no adapter {adapter!r}, only {sorted(model.peft_config)}")
    tensors = get_peft_model_state_dict(model, adapter_name=adapter)
    # A part of the model may be compiled, too.
    plain = {name.replace(f"{_COMPILED}.", ""): tensor for name, tensor in tensors.items()}
    return plain, model.peft_config[adapter]


class PeftFolder(os.PathLike[str]):
    """A folder with an adapter's two files."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = pathlib.Path(path)

    def __fspath__(self) -> str:
        return str(self._path)

    def contents(self) -> tuple[str, Image]:
        """adapter_config.json, and the tensors' file. Raises FileNotFoundError."""
        folder = self._path
        if not folder.is_dir():
            raise FileNotFoundError(f"no adapter folder {folder}")
        for name in (CONFIG_FILE, TENSORS_FILE):
            if not (folder / name).is_file():
                hint = ""
                if name == TENSORS_FILE and (folder / "adapter_model.bin").is_file():
                    hint = " (adapter_model.bin is a pickle: save with safe_serialization=True)"
                raise FileNotFoundError(f"{folder} has no {name}{hint}")
        config = (folder / CONFIG_FILE).read_text(encoding="utf-8")
        return config, FileImage(folder / TENSORS_FILE)


def server_path(path: str | os.PathLike[str]) -> str:
    """A folder of the server's host. Raises ValueError unless it is absolute: a relative path would
    be below the server's working directory."""
    text = os.fspath(path)
    if not os.path.isabs(text):
        raise ValueError(f"a path on the server's host must be absolute, not {text!r}")
    return text


class Upload:
    """One publish: a Publish stream, and further ones to resume it.

    `options` are the other fields of PublishBegin, by name.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        path: str | os.PathLike[str] | None,
        tensors: Mapping[str, Any] | None,
        model: Any,
        model_adapter: str | None,
        config: Any,
        progress: Progress | None,
    ) -> None:
        if sum(source is not None for source in (path, tensors, model)) != 1:
            raise ValueError("publish needs exactly one of path, tensors and model")
        if model_adapter is not None and model is None:
            raise ValueError("model_adapter needs model")
        self._image: Image
        if model is not None:
            tensors, own = from_peft_model(model, model_adapter)
            config = own if config is None else config
        if path is not None:
            folder = path if isinstance(path, PeftFolder) else PeftFolder(path)
            text, self._image = folder.contents()
            text = text if config is None else config_json(config)
        else:
            assert tensors is not None
            if config is None:
                raise ValueError("publish with tensors needs config")
            text, self._image = config_json(config), TensorImage(tensors)
        self._progress = progress
        self.begin = filled(
            adapters_pb2.PublishBegin,
            adapter_config_json=text,
            safetensors_size=self._image.size,
            upload_id=uuid.uuid4().hex,
            **options,
        )
        self._lock = threading.Lock()
        self._stream = 0  # Number of the newest stream; older ones no longer report.
        self.sent = 0
        """Bytes of the file sent by the newest stream."""
        self.failure: BaseException | None = None
        """The local error that stopped the upload: gRPC only reports that iterating failed."""

    def again(self, options: Mapping[str, Any]) -> Upload:
        """Another publish of the same files, with these fields in place of its own."""
        other = copy.copy(self)
        other.begin = adapters_pb2.PublishBegin(
            adapter_config_json=self.begin.adapter_config_json,
            safetensors_size=self.begin.safetensors_size,
            safetensors_sha256=self.begin.safetensors_sha256,
        )
        other.begin.MergeFrom(filled(adapters_pb2.PublishBegin, **options))
        other._lock = threading.Lock()
        other._stream = 0
        return other

    def hashes(self) -> tuple[str, str]:
        """SHA-256 of adapter_config.json and of the file, hexadecimal. Reads the whole file."""
        if not self.begin.safetensors_sha256:
            digest = hashlib.sha256()
            for piece in self._image.pieces():
                digest.update(piece)
            self.begin.safetensors_sha256 = digest.digest()
        config = hashlib.sha256(self.begin.adapter_config_json.encode()).hexdigest()
        return config, self.begin.safetensors_sha256.hex()

    @property
    def id(self) -> str:
        """The upload_id."""
        return self.begin.upload_id

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._image.size

    def messages(self, offset: int) -> Iterator[adapters_pb2.PublishRequest]:
        """Begin, the chunks from `offset` on, Commit."""
        with self._lock:
            self._stream += 1
            stream = self._stream
            self.sent = offset
        return self._guarded(offset, stream)

    def _guarded(self, offset: int, stream: int) -> Iterator[adapters_pb2.PublishRequest]:
        try:
            yield from self._messages(offset, stream)
        except Exception as error:
            self.failure = error
            raise

    def _messages(self, offset: int, stream: int) -> Iterator[adapters_pb2.PublishRequest]:
        self.hashes()
        yield adapters_pb2.PublishRequest(begin=self.begin)
        if offset > 0:  # The server may have more than the last stream reported.
            self._report(offset, stream)
        for piece in self._image.pieces(offset):
            chunk = adapters_pb2.PublishChunk(offset=offset, data=bytes(piece))
            yield adapters_pb2.PublishRequest(chunk=chunk)
            offset += piece.nbytes
            self._report(offset, stream)
        yield adapters_pb2.PublishRequest(commit=adapters_pb2.PublishCommit())

    def _report(self, sent: int, stream: int) -> None:
        with self._lock:
            if stream != self._stream:
                return
            self.sent = sent
            if self._progress is not None:
                self._progress(sent, self.size)
