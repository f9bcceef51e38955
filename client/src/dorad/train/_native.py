"""The CUDA kernels of compose, in libdorad_train.so, called through ctypes."""

from __future__ import annotations

import ctypes
import logging
import os
import pathlib

import torch

VARIABLE = "DORAD_TRAIN_LIBRARY"
_FILE = "libdorad_train.so"

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The library's numbers for the dtypes it computes."""

_logger = logging.getLogger("dorad.train")


class Library:
    """One loaded libdorad_train.so. Its methods may be called by any thread.

    They enqueue work on `stream` and return at once. All tensors are contiguous and on one device;
    base, lora, grad and what is derived from them are of one of TYPES, g and d_g fp32.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises OSError when it cannot be loaded, AttributeError when it lacks a function."""
        library = ctypes.CDLL(os.fspath(path))
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        scalar, kind = ctypes.c_float, ctypes.c_int32
        self._forward = library.dorad_compose_forward
        self._forward.argtypes = [*[pointer] * 5, size, size, scalar, kind, pointer]
        self._forward.restype = ctypes.c_int
        self._workspace = library.dorad_compose_backward_workspace
        self._workspace.argtypes = [size, size]
        self._workspace.restype = size
        self._backward = library.dorad_compose_backward
        self._backward.argtypes = [*[pointer] * 7, size, size, size, scalar, kind, pointer]
        self._backward.restype = ctypes.c_int

    def forward(
        self,
        base: torch.Tensor,
        lora: torch.Tensor,
        g: torch.Tensor,
        delta: torch.Tensor,
        inner: torch.Tensor | None,
        scaling: float,
        stream: int,
    ) -> None:
        """Fills `delta`, and `inner` unless it is None."""
        rows, out = base.shape
        error = self._forward(
            base.data_ptr(),
            lora.data_ptr(),
            g.data_ptr(),
            delta.data_ptr(),
            _pointer(inner),
            rows,
            out,
            scaling,
            TYPES[base.dtype],
            stream,
        )
        _check(error, "dorad_compose_forward")

    def backward(
        self,
        grad: torch.Tensor,
        inner: torch.Tensor | None,
        g: torch.Tensor,
        d_base: torch.Tensor | None,
        d_lora: torch.Tensor | None,
        d_g: torch.Tensor | None,
        scaling: float,
        stream: int,
    ) -> None:
        """Fills those of `d_base`, `d_lora` and `d_g` that are not None; `d_g` needs `inner`."""
        rows, out = grad.shape
        workspace_bytes = 0 if d_g is None else int(self._workspace(rows, out))
        workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=grad.device)
        error = self._backward(
            grad.data_ptr(),
            None if d_g is None else _pointer(inner),
            g.data_ptr(),
            _pointer(d_base),
            _pointer(d_lora),
            _pointer(d_g),
            workspace.data_ptr() or None,
            workspace_bytes,
            rows,
            out,
            scaling,
            TYPES[grad.dtype],
            stream,
        )
        _check(error, "dorad_compose_backward")


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _check(error: int, function: str) -> None:
    if error != 0:
        raise RuntimeError(f"{function} failed with cudaError_t {error}")


def _load() -> Library | None:
    named = os.environ.get(VARIABLE)
    if named:
        return Library(named)
    beside = pathlib.Path(__file__).with_name(_FILE)
    if beside.is_file():
        return Library(beside)
    _logger.warning(
        "no %s beside the package and no %s: DoRA on CUDA composes in plain torch", _FILE, VARIABLE
    )
    return None


# At import, so that torch.compile finds a constant. Without a CUDA device nothing would call it.
library: Library | None = _load() if torch.cuda.is_available() else None
"""The library at DORAD_TRAIN_LIBRARY, else the one beside this file, else None."""
