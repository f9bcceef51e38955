"""Reads adapters from folders below the gateway's roots."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

from dorad._channel import CHUNK_BYTES
from dorad._publish import CONFIG_FILE, TENSORS_FILE, Image, PeftFolder
from dorad.gateway.errors import Refusal
from dorad.gateway.files import open_below

_CONFIG_BYTES = 1 << 20


@contextlib.contextmanager
def opened(path: str, roots: Sequence[Path]) -> Iterator[PeftFolder]:
    """A folder whose files are open: another process cannot replace them any more.

    Raises Refusal for a path that does not lie, links resolved, below one of `roots`, as a server
    does (adapters.allowed_roots). Blocks on the disk.
    """
    root, folder = _resolve(path, roots)
    with contextlib.ExitStack() as stack:
        found = []
        for name in (CONFIG_FILE, TENSORS_FILE):
            found.append(_open(root, folder / name))
            stack.callback(os.close, found[-1])
        config, tensors = found
        yield _Opened(path, _read_config(config), _OpenImage(tensors))


class _Opened(PeftFolder):
    def __init__(self, path: str, config: str, image: Image) -> None:
        super().__init__(path)
        self._contents = config, image

    def contents(self) -> tuple[str, Image]:
        return self._contents


def _read_config(descriptor: int) -> str:
    raw = os.pread(descriptor, _CONFIG_BYTES + 1, 0)
    if len(raw) > _CONFIG_BYTES:
        message = f"{CONFIG_FILE} has more than {_CONFIG_BYTES} bytes"
        raise Refusal(400, "FILE_TOO_LARGE", message, param="lora_path")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        message = f"{CONFIG_FILE} is not UTF-8"
        raise Refusal(400, "JSON_SYNTAX", message, param="lora_path") from None


class _OpenImage:
    """The bytes of an open file. It has a descriptor of its own until nobody has the image: gRPC
    goes on reading for a moment when the server has refused the call."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self._descriptor)
        self.size = os.fstat(descriptor).st_size

    def pieces(self, offset: int = 0) -> Iterator[memoryview]:
        while data := os.pread(self._descriptor, CHUNK_BYTES, offset):
            yield memoryview(data)
            offset += len(data)


def _resolve(path: str, roots: Sequence[Path]) -> tuple[Path, Path]:
    """The root and the folder, both without links."""
    if not roots:
        message = "this gateway reads no folders: it has no --adapter-root"
        raise Refusal(403, "PATH_NOT_ALLOWED", message, param="lora_path")
    if not os.path.isabs(path):
        message = f"lora_path must be absolute, not {path!r}"
        raise Refusal(400, "PATH_NOT_ABSOLUTE", message, param="lora_path")
    if "\0" in path or len(os.fsencode(path)) > 4095:
        raise Refusal(400, "PATH_TOO_LONG", "lora_path is no path", param="lora_path")
    folder = Path(os.path.realpath(path))
    for allowed in roots:
        root = Path(os.path.realpath(allowed))
        if folder.is_relative_to(root):
            if not folder.is_dir():
                message = f"there is no folder {path!r}"
                raise Refusal(404, "ADAPTER_FOLDER_NOT_FOUND", message, param="lora_path")
            return root, folder
    raise _not_allowed(path)


def _not_allowed(path: str) -> Refusal:
    message = f"{path!r} does not lie below one of the gateway's --adapter-root"
    return Refusal(403, "PATH_NOT_ALLOWED", message, param="lora_path")


def _open(root: Path, path: Path) -> int:
    try:
        return open_below(root, path)
    except PermissionError:
        raise _not_allowed(str(path)) from None
    except FileNotFoundError:
        raise _missing(path) from None


def _missing(path: Path) -> Refusal:
    message = f"the folder has no file {path.name} that the gateway can read"
    return Refusal(404, "FILE_NOT_FOUND", message, param="lora_path")
