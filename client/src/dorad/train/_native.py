"""The CUDA kernels of norm and compose, in libdorad_train.so, called through ctypes."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import os
import pathlib
import struct
from collections.abc import Sequence
from typing import Any

import torch

VARIABLE = "DORAD_TRAIN_LIBRARY"
_FILE = "libdorad_train.so"
_ABI = 5  # DORAD_TRAIN_ABI in kernels/train/abi.h

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The library's numbers for the dtypes it composes."""
MOST_RANK = 4096
"""The largest rank for the library's norms (kernels/dora/norm.h)."""

_logger = logging.getLogger("dorad.train")


MOST_LINEARS = 8
"""The most linears of a call."""
# Arrays of struct dorad_linear, by their lengths.
_LINEARS = [struct.Struct("12P2qd" * count) for count in range(MOST_LINEARS + 1)]

Sizes = tuple[tuple[int, int], ...]
"""The outs and ranks of a call's linears."""


class Library:
    """One loaded libdorad_train.so. Its methods may be called by any thread.

    They enqueue work on the current stream of the tensors' device and return at once. All tensors
    are contiguous and on one device; base, lora, grad and tensors derived from them are [..., out]
    of one of TYPES, g and d_g [out] in fp32.
    """

    def __init__(self, path: str | os.PathLike[str], gemm: int) -> None:
        """`gemm` is the address of cublasGemmEx in torch's cuBLAS.

        Raises OSError when the library cannot be loaded or is of another version.
        """
        self._gemm = gemm
        library = ctypes.CDLL(os.fspath(path))
        abi = library.dorad_train_abi()
        if abi != _ABI:
            raise OSError(
                f"{path} has the interface {abi}, and this package needs {_ABI}: build it"
            )
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        scalar, kind = ctypes.c_float, ctypes.c_int32
        self._forward = library.dorad_compose_forward
        self._forward.argtypes = [*[pointer] * 5, size, size, scalar, kind, pointer]
        self._backward = library.dorad_compose_backward
        self._backward.argtypes = [*[pointer] * 7, size, size, size, scalar, kind, pointer]
        linears: list[Any] = [pointer, kind]
        rest: list[Any] = [size, size, size, scalar]
        self._linears_forward = library.dorad_linears_forward
        self._linears_forward.argtypes = [
            *[pointer] * 2,
            *linears,
            *[pointer] * 3,
            *rest,
            *[kind] * 3,
            pointer,
        ]
        self._linears_backward = library.dorad_linears_backward
        self._linears_backward.argtypes = [
            *[pointer] * 2,
            *linears,
            *[pointer] * 5,
            *rest,
            *[kind] * 4,
            pointer,
        ]
        self._three_terms = library.dorad_three_terms
        self._three_terms.argtypes = [*[pointer] * 4, *[size] * 3, kind, pointer]
        self._norm = library.dorad_direct_norm
        self._norm.argtypes = [*[pointer] * 6, *[size] * 5, ctypes.c_double, kind, pointer]
        for function in (
            self._forward,
            self._backward,
            self._linears_forward,
            self._linears_backward,
            self._three_terms,
            self._norm,
            library.dorad_train_check_device,
        ):
            function.restype = ctypes.c_int
        self._check_device = library.dorad_train_check_device
        self._why_not: dict[torch.device, str | None] = {}
        self._backward_bytes = _sizes(library.dorad_compose_backward_workspace, 2)
        self._norm_bytes = _sizes(library.dorad_direct_norm_workspace, 3)
        self._forward_workspace = _sizes_of(
            library.dorad_linears_forward_bytes, [size, size, *[kind] * 3]
        )
        self._backward_workspace = _sizes_of(
            library.dorad_linears_backward_bytes, [size, size, kind, kind]
        )

    def why_not_on(self, device: torch.device) -> str | None:
        """The reason why nothing of it runs on `device`, if any. The first time it is logged."""
        if device not in self._why_not:
            with torch.cuda.device(device):
                error = self._check_device()
            why = None
            if error != 0:
                major, minor = torch.cuda.get_device_capability(device)
                why = f"{_FILE} has no code for GPUs of compute capability {major}.{minor}"
                _logger.warning(
                    "%s (cudaError_t %d): DoRA on %s is plain torch", why, error, device
                )
            self._why_not[device] = why
        return self._why_not[device]

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
        workspace = _workspace(0 if d_g is None else self._backward_bytes(rows, out), grad)
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

    def linears_forward(
        self,
        x: torch.Tensor,
        linears: Sequence[float],
        sizes: Sizes,
        rows: int,
        h: torch.Tensor,
        epsilon: float,
        factor_dtype: torch.dtype,
        magnitude_dtype: torch.dtype | None,
    ) -> None:
        """Fills `h` and each linear's inner and y, and with a magnitude's dtype its norm and g.

        `x` is [..., in], of so many rows.
        `linears` has what each struct dorad_linear has, one after the other: addresses, 0 for none;
        sizes. kernels/train/linear.h describes the arguments; biases are in fp32, and a y may be
        its inner.
        """
        width = x.shape[-1]
        dtype, factors = TYPES[x.dtype], TYPES[factor_dtype]
        makes_norms = magnitude_dtype is not None
        needed = self._forward_workspace(sizes, rows, width, dtype, factors, makes_norms)
        memory = _workspace(needed, x)
        _enqueue(
            self._linears_forward,
            x.device,
            _LINEARS[len(sizes)].pack(*linears),
            len(sizes),
            x.data_ptr(),
            h.data_ptr(),
            _pointer(memory),
            needed,
            rows,
            width,
            epsilon,
            dtype,
            factors,
            0 if magnitude_dtype is None else TYPES[magnitude_dtype],
            gemm=self._gemm,
        )

    def linears_backward(
        self,
        x: torch.Tensor | None,
        linears: Sequence[float],
        sizes: Sizes,
        rows: int,
        h: torch.Tensor | None,
        d_x: torch.Tensor | None,
        d_a: torch.Tensor | None,
        grad: torch.Tensor,
        epsilon: float,
        width: int,
        factor_dtype: torch.dtype,
        magnitude_dtype: torch.dtype,
        sum_dtype: torch.dtype,
    ) -> None:
        """Fills the gradients that are there, of which those of A and B are of `sum_dtype`.

        `linears` and `rows` are as in `linears_forward`, and `grad` is one of the gradients of y.
        kernels/train/linear.h describes the arguments and their dependencies.
        """
        dtype, factors = TYPES[grad.dtype], TYPES[factor_dtype]
        needed = self._backward_workspace(sizes, rows, width, dtype, factors)
        memory = _workspace(needed, grad)
        _enqueue(
            self._linears_backward,
            grad.device,
            _LINEARS[len(sizes)].pack(*linears),
            len(sizes),
            _pointer(x),
            _pointer(h),
            _pointer(d_x),
            _pointer(d_a),
            _pointer(memory),
            needed,
            rows,
            width,
            epsilon,
            dtype,
            factors,
            TYPES[magnitude_dtype],
            TYPES[sum_dtype],
            gemm=self._gemm,
        )

    def three_terms(
        self, a: torch.Tensor, b: torch.Tensor, to_a: torch.Tensor, to_b: torch.Tensor
    ) -> None:
        """Fills `to_a` [3·rank, in] and `to_b` [out, 3·rank] in bf16: see kernels/train/factors.h.

        `a` is [rank, in] and `b` [out, rank], of one of TYPES.
        """
        (rank, width), out = a.shape, b.shape[0]
        _enqueue(
            self._three_terms,
            a.device,
            a.data_ptr(),
            b.data_ptr(),
            to_a.data_ptr(),
            to_b.data_ptr(),
            out,
            width,
            rank,
            TYPES[a.dtype],
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
        workspace = _workspace(self._norm_bytes(out, width, rank), weight)
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


def _sizes_of(function: Any, arguments: list[Any]) -> Any:
    """A library's function from linears' sizes to bytes, asked once for each shape."""
    function.argtypes = [ctypes.c_void_p, ctypes.c_int32, *arguments]
    function.restype = ctypes.c_int64

    @functools.lru_cache(maxsize=4096)
    def size(sizes: Sizes, *others: int) -> int:
        linears = b"".join(_LINEARS[1].pack(*[0] * 12, *each, 0.0) for each in sizes)
        needed: int = function(linears, len(sizes), *others)
        return needed

    return size


def _workspace(size: int, like: torch.Tensor) -> torch.Tensor | None:
    return like.new_empty(size, dtype=torch.uint8) if size > 0 else None


def _enqueue(
    function: Any, device: torch.device, *arguments: float | bytes | None, gemm: int | None = None
) -> None:
    """Calls `function` with the device's current stream after `arguments`.

    With the address of `gemm`, that and torch's cuBLAS handle precede them.
    """
    if device.index == torch.cuda.current_device():  # A guard costs as much as the call.
        error = _call(function, device, arguments, gemm)
    else:
        with torch.cuda.device(device):
            error = _call(function, device, arguments, gemm)
    if error != 0:
        raise RuntimeError(f"{function.__name__} failed with cudaError_t {error}")


def _call(
    function: Any,
    device: torch.device,
    arguments: tuple[float | bytes | None, ...],
    gemm: int | None,
) -> int:
    # As of torch.cuda.current_stream, without making an object of it.
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    if gemm is None:
        error: int = function(*arguments, stream)
    else:  # The handle is the current device's, with its stream.
        error = function(gemm, torch._C._cuda_getCurrentBlasHandle(), *arguments, stream)
    return error


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _gemm() -> int:
    """The address of cublasGemmEx. Raises OSError without the cuBLAS that torch has loaded."""
    version = str(torch.version.cuda).partition(".")[0]
    address = ctypes.cast(ctypes.CDLL(f"libcublas.so.{version}").cublasGemmEx, ctypes.c_void_p)
    assert address.value is not None
    return address.value


def _load() -> Library | None:
    named = os.environ.get(VARIABLE)
    if named:
        return Library(named, _gemm())
    for path in _places():
        if path.is_file():
            return Library(path, _gemm())
    _logger.warning(
        "no %s beside this package or in dorad-server, and no %s: DoRA on CUDA is plain torch",
        _FILE,
        VARIABLE,
    )
    return None


def _places() -> list[pathlib.Path]:
    """Beside this file (a checkout) and in the package dorad-server of the same environment."""
    server = importlib.util.find_spec("dorad_server")
    roots = (server.submodule_search_locations if server else None) or []
    return [
        pathlib.Path(__file__).with_name(_FILE),
        *(pathlib.Path(root) / "lib" / _FILE for root in roots),
    ]


# At import, so that torch.compile finds a constant. Without a CUDA device nothing would call it.
library: Library | None = _load() if torch.cuda.is_available() else None
"""The library at DORAD_TRAIN_LIBRARY, beside this file or in dorad-server, else None."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def why_missing(device: torch.device) -> str | None:
    """The reason why there are no kernels for a GPU, if any."""
    return f"there is no {_FILE}" if library is None else library.why_not_on(device)
