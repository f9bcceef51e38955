"""The norm of DoRA, ‖W + s·B·A‖ along each row. B·A is never stored."""

from __future__ import annotations

import os

import torch

from dorad.train._direct import direct_norm, half_terms
from dorad.train._dispatch import watched
from dorad.train._squares import SquareCache

CHUNK_VARIABLE = "DORAD_TRAIN_NORM_CHUNK_MIB"
DEFAULT_CHUNK_BYTES = 256 << 20
_ALIGNMENT = 64  # columns

squares = SquareCache()
"""Of all frozen weights whose norms were computed."""


def clear_cache() -> None:
    """Drops the cached ‖W‖² of all weights: call it after a write that torch does not count.

    Writes through `weight.data` are such, as in PEFT's merging. `patch` drops them, too.
    """
    squares.clear()


def default_chunk_bytes() -> int:
    """DORAD_TRAIN_NORM_CHUNK_MIB in bytes, else 256 MiB."""
    text = os.environ.get(CHUNK_VARIABLE)
    if text is None:
        return DEFAULT_CHUNK_BYTES
    try:
        mebibytes = int(text)
    except ValueError:
        mebibytes = 0
    if mebibytes <= 0:
        raise ValueError(f"{CHUNK_VARIABLE} must be a positive number of MiB, not {text!r}")
    return mebibytes << 20


_chunk_bytes = default_chunk_bytes()


def accumulation_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """fp64 when one of them is, else fp32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def epsilon(dtype: torch.dtype) -> float:
    """The smallest divisor of a magnitude, for base weights of `dtype`."""
    return 1e-12 if dtype in (torch.float32, torch.float64) else 1e-6


def weight_norm(
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scaling: float,
    *,
    chunk_bytes: int | None = None,
    cache: bool = False,
) -> torch.Tensor:
    """‖weight + scaling·b @ a‖ of each row, [out], in fp32, or fp64 when an input is fp64.

    `weight` is [out, in] (a transposed view will do), `a` [rank, in], `b` [out, rank]. The result
    is detached.

    On CUDA `direct_norm` is used where it can be. Else columns are taken in chunks, multiples of
    64, so that a chunk of the weight widened to fp32 fits into `chunk_bytes`, and `cache` keeps
    ‖weight‖² for the next call: for frozen weights.

    Raises ValueError for inconsistent shapes.
    """
    out, width = _matrix(weight, "weight")
    rank, a_width = _matrix(a, "a")
    if a_width != width or b.shape != (out, rank):
        raise ValueError(
            f"weight is [{out}, {width}] and a is [{rank}, {a_width}]: a must be [rank, {width}]"
            f" and b [{out}, rank], not {list(b.shape)}"
        )
    budget = _chunk_bytes if chunk_bytes is None else chunk_bytes
    compute = _operator if watched(weight, a, b) else _weight_norm
    with torch.no_grad():
        norm: torch.Tensor = compute(
            weight.detach(), a.detach(), b.detach(), scaling, budget, cache
        )
    return norm


def _matrix(tensor: torch.Tensor, name: str) -> tuple[int, int]:
    if tensor.dim() != 2:
        raise ValueError(f"{name} must be a matrix, not {list(tensor.shape)}")
    rows, columns = tensor.shape
    return rows, columns


def _weight_norm(
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scaling: float,
    chunk_bytes: int,
    cache: bool,
) -> torch.Tensor:
    if weight.is_cuda:
        norm = direct_norm(weight, a, b, scaling)
        if norm is not None:
            return norm
    dtype = accumulation_dtype(weight.dtype, a.dtype, b.dtype)
    # Autocast would compute the products below in half precision.
    with torch.autocast(weight.device.type, enabled=False):
        chunks = _chunks(weight, dtype, chunk_bytes)
        if cache:
            total = squares.get(weight, dtype, lambda: _sum_of_squares(weight, dtype, chunks))
        else:
            total = _sum_of_squares(weight, dtype, chunks)
        if scaling != 0:
            b = b.to(dtype)
            gram = torch.zeros(a.shape[0], a.shape[0], dtype=dtype, device=a.device)
            cross = torch.zeros_like(total)
            for begin, end in chunks:
                part = a[:, begin:end]
                cross += _product(weight[:, begin:end], part, dtype).mul_(b).sum(1)
                part = part.to(dtype)
                gram.addmm_(part, part.T)
            product = (b @ gram).mul_(b).sum(1)
            # Rounding can make the sum negative; a NaN stays one.
            total = (total + (2 * scaling) * cross + (scaling * scaling) * product).clamp_min(0)
        return total.sqrt()


def _product(weight: torch.Tensor, a: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """weight @ a.T in `dtype`."""
    if weight.is_cuda and weight.dtype == torch.bfloat16 and dtype == torch.float32:
        # Tensor cores with fp32 sums, in torch only on CUDA: W is not widened.
        first, *others = [torch.mm(weight, term.T, out_dtype=dtype) for term in half_terms(a)]
        for other in others:
            first += other
        return first
    return weight.to(dtype) @ a.to(dtype).T


# A custom operator: torch.compile sees one node, and the cache works in compiled code.
_operator = torch.library.custom_op(
    "dorad::weight_norm",
    _weight_norm,
    mutates_args=(),
    schema="(Tensor weight, Tensor a, Tensor b, float scaling, int chunk_bytes, bool cache)"
    " -> Tensor",
)


@_operator.register_fake
def _(
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scaling: float,
    chunk_bytes: int,
    cache: bool,
) -> torch.Tensor:
    dtype = accumulation_dtype(weight.dtype, a.dtype, b.dtype)
    return weight.new_empty(weight.shape[0], dtype=dtype)


def _chunks(weight: torch.Tensor, dtype: torch.dtype, chunk_bytes: int) -> list[tuple[int, int]]:
    out, width = weight.shape
    columns = chunk_bytes // max(1, out * dtype.itemsize)
    columns = max(_ALIGNMENT, columns // _ALIGNMENT * _ALIGNMENT)
    return [(begin, min(begin + columns, width)) for begin in range(0, width, columns)]


def _sum_of_squares(
    weight: torch.Tensor, dtype: torch.dtype, chunks: list[tuple[int, int]]
) -> torch.Tensor:
    total = torch.zeros(weight.shape[0], dtype=dtype, device=weight.device)
    for begin, end in chunks:
        # A norm makes no temporary of the chunk's size, unlike a product and its sum.
        total += torch.linalg.vector_norm(weight[:, begin:end], dim=1, dtype=dtype).square()
    return total
