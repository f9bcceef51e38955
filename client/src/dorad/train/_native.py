"""The CUDA kernels of norm and compose, in libdorad_train.so, called through ctypes."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import pathlib
from typing import Any

import torch

VARIABLE = "DORAD_TRAIN_LIBRARY"
_FILE = "libdorad_train.so"

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The library's numbers for the dtypes it composes."""
MOST_RANK = 4096
"""The largest that the library takes norms of (kernels/dora/norm.h)."""

_logger = logging.getLogger("dorad.train")


class Library:
    """One loaded libdorad_train.so. Its methods may be called by any thread.

    They enqueue work on the current stream of the tensors' device and return at once. All tensors
    are contiguous and on one device; base, lora, grad and what is derived from them are [..., out]
    of one of TYPES, g and d_g [out] in fp32.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises OSError when it cannot be loaded, AttributeError when it lacks a function."""
        library = ctypes.CDLL(os.fspath(path))
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        scalar, kind = ctypes.c_float, ctypes.c_int32
        self._forward = library.dorad_compose_forward
        self._forward.argtypes = [*[pointer] * 5, size, size, scalar, kind, pointer]
        self._backward = library.dorad_compose_backward
        self._backward.argtypes = [*[pointer] * 7, size, size, size, scalar, kind, pointer]
        self._norm = library.dorad_direct_norm
        double = ctypes.c_double
        self._norm.argtypes = [*[pointer] * 6, *[size] * 5, double, kind, pointer]
        for function in (self._forward, self._backward, self._norm):
            function.restype = ctypes.c_int
        self._backward_bytes = _sizes(library.dorad_compose_backward_workspace, 2)
        self._norm_bytes = _sizes(library.dorad_direct_norm_workspace, 3)

    def forward(
        self,
        base: torch.Tensor,
        lora: torch.Tensor,
        g: torch.Tensor,
        delta: torch.Tensor,
        inner: torch.Tensor | None,
        scaling: float,
    ) -> None:
        """Fills `delta`, and `inner` unless it is None."""
        out = g.numel()
        _enqueue(
            self._forward,
            base.device,
            base.data_ptr(),
            lora.data_ptr(),
            g.data_ptr(),
            delta.data_ptr(),
            _pointer(inner),
            base.numel() // out,
            out,
            scaling,
            TYPES[base.dtype],
        )

    def backward(
        self,
        grad: torch.Tensor,
        inner: torch.Tensor | None,
        g: torch.Tensor,
        d_base: torch.Tensor | None,
        d_lora: torch.Tensor | None,
        d_g: torch.Tensor | None,
        scaling: float,
    ) -> None:
        """Fills those of `d_base`, `d_lora` and `d_g` that are not None; `d_g` needs `inner`."""
        out = g.numel()
        rows = grad.numel() // out
        workspace = _workspace(0 if d_g is None else self._backward_bytes(rows, out), grad.device)
        _enqueue(
            self._backward,
            grad.device,
            grad.data_ptr(),
            None if d_g is None else _pointer(inner),
            g.data_ptr(),
            _pointer(d_base),
            _pointer(d_lora),
            _pointer(d_g),
            _pointer(workspace),
            0 if workspace is None else workspace.numel(),
            rows,
            out,
            scaling,
            TYPES[grad.dtype],
        )

    def norm(
        self,
        weight: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        norm: torch.Tensor,
        scaling: float,
        weight_by_in: bool,
    ) -> None:
        """Fills `norm`, fp32 [out], with the row norms of weight + scaling·b @ a.

        `weight` is [out, in], or [in, out] with `weight_by_in`, `a` [rank, in] and `b` [out, rank],
        all in bf16; neither `scaling` nor the rank, at most MOST_RANK, is zero.
        """
        out, rank = b.shape
        width = a.shape[1]
        workspace = _workspace(self._norm_bytes(out, width, rank), weight.device)
        _enqueue(
            self._norm,
            weight.device,
            weight.data_ptr(),
            a.data_ptr(),
            b.data_ptr(),
            None,
            norm.data_ptr(),
            _pointer(workspace),
            0 if workspace is None else workspace.numel(),
            out,
            width,
            rank,
            rank,
            scaling,
            weight_by_in,
        )


def _sizes(function: Any, arguments: int) -> Any:
    """A library's function from sizes to bytes, asked once for each shape."""
    function.argtypes = [ctypes.c_int64] * arguments
    function.restype = ctypes.c_int64
    return functools.lru_cache(maxsize=4096)(function)


def _workspace(size: int, device: torch.device) -> torch.Tensor | None:
    return torch.empty(size, dtype=torch.uint8, device=device) if size > 0 else None


def _enqueue(function: Any, device: torch.device, *arguments: float | None) -> None:
    """Calls `function` with the device's current stream after `arguments`."""
    stream = torch.cuda.current_stream(device).cuda_stream
    if device.index == torch.cuda.current_device():  # A guard costs as much as the call.
        error = function(*arguments, stream)
    else:
        with torch.cuda.device(device):
            error = function(*arguments, stream)
    if error != 0:
        raise RuntimeError(f"{function.__name__} failed with cudaError_t {error}")


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _load() -> Library | None:
    named = os.environ.get(VARIABLE)
    if named:
        return Library(named)
    beside = pathlib.Path(__file__).with_name(_FILE)
    if beside.is_file():
        return Library(beside)
    _logger.warning(
        "no %s beside the package and no %s: DoRA on CUDA is plain torch", _FILE, VARIABLE
    )
    return None


# At import, so that torch.compile finds a constant. Without a CUDA device nothing would call it.
library: Library | None = _load() if torch.cuda.is_available() else None
"""The library at DORAD_TRAIN_LIBRARY, else the one beside this file, else None."""
