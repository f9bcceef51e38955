"""The norm of DoRA, ‖W + s·B·A‖ along each row. B·A is never stored."""

from __future__ import annotations

import os

import torch

from dorad.train._direct import direct_norm, half_terms
from dorad.train._dispatch import watched

CHUNK_VARIABLE = "DORAD_TRAIN_NORM_CHUNK_MIB"
DEFAULT_CHUNK_BYTES = 32 << 20  # It stays in a GPU's L2 cache between the passes over it.
_CPU_CHUNK_BYTES = 4 << 20  # The same of a CPU's.


def default_chunk_bytes() -> int:
    """DORAD_TRAIN_NORM_CHUNK_MIB in bytes, else 32 MiB."""
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


CHUNK_BYTES = default_chunk_bytes()
"""Of this process: of the memory that a norm takes besides its result."""


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
) -> torch.Tensor:
    """‖weight + scaling·b @ a‖ of each row, [out], in fp32, or fp64 when an input is fp64.

    `weight` is [out, in] (a transposed view will do), `a` [rank, in], `b` [out, rank]. The result
    is detached.

    On CUDA `direct_norm` is used where it can be. Else blocks of weight + scaling·b @ a are made,
    squared and summed one after the other, each of at most `chunk_bytes` (one row at least) in the
    result's dtype. Adding before squaring keeps the digits of rows in which b @ a nearly cancels
    the weight.

    Raises ValueError for inconsistent shapes.
    """
    out, width = _matrix(weight, "weight")
    rank, a_width = _matrix(a, "a")
    if a_width != width or b.shape != (out, rank):
        raise ValueError(
            f"weight is [{out}, {width}] and a is [{rank}, {a_width}]: a must be [rank, {width}]"
            f" and b [{out}, rank], not {list(b.shape)}"
        )
    budget = CHUNK_BYTES if chunk_bytes is None else chunk_bytes
    compute = _operator if watched(weight, a, b) else _weight_norm
    with torch.no_grad():
        norm: torch.Tensor = compute(weight.detach(), a.detach(), b.detach(), scaling, budget)
    return norm


def plain_norm(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float
) -> torch.Tensor:
    """`weight_norm` of a small weight outside of autocast, as a whole and unchecked.

    b @ a may be of another shape than `weight`, with as many elements in the same order.
    """
    weight, a, b = weight.detach(), a.detach(), b.detach()
    dtype = accumulation_dtype(weight.dtype, a.dtype, b.dtype)
    if weight.dtype == a.dtype == b.dtype == dtype and len(weight) == len(b):
        total = torch.addmm(weight, b, a, alpha=scaling)
    else:
        product = torch.mm(b.to(dtype), a.to(dtype)).view(weight.shape)
        total = torch.add(weight, product, alpha=scaling)
    norm: torch.Tensor = torch.linalg.vector_norm(total, dim=1)
    return norm


def _matrix(tensor: torch.Tensor, name: str) -> tuple[int, int]:
    if tensor.dim() != 2:
        raise ValueError(f"{name} must be a matrix, not {list(tensor.shape)}")
    rows, columns = tensor.shape
    return rows, columns


def _weight_norm(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, chunk_bytes: int
) -> torch.Tensor:
    if weight.is_cuda:
        norm = direct_norm(weight, a, b, scaling)
        if norm is not None:
            return norm
    else:
        chunk_bytes = min(chunk_bytes, _CPU_CHUNK_BYTES)
    dtype = accumulation_dtype(weight.dtype, a.dtype, b.dtype)
    # Autocast would compute the products below in half precision.
    with torch.autocast(weight.device.type, enabled=False):
        if scaling == 0 or len(a) == 0:
            of_weight: torch.Tensor = torch.linalg.vector_norm(weight, dim=1, dtype=dtype)
            return of_weight
        # Blocks are rows of the matrix as it is stored.
        transposed = weight.stride(0) == 1 < weight.stride(1)
        stored, left, right = (weight.T, a.T, b.T) if transposed else (weight, b, a)
        rows, columns = stored.shape
        step = max(1, chunk_bytes // max(1, columns * dtype.itemsize))
        norm = weight.new_zeros(len(weight), dtype=dtype)
        buffer = None
        if weight.is_cuda and weight.dtype == torch.bfloat16 and dtype == torch.float32:
            left, right = _half_factors(left, right)
        else:
            left, right = left.to(dtype), right.to(dtype)
            buffer = norm.new_empty(min(step, rows), columns)
        for begin in range(0, rows, step):
            part = slice(begin, begin + step)
            block = _block(stored[part], left[part], right, scaling, buffer)
            if transposed:
                norm += torch.linalg.vector_norm(block, dim=0).square_()
            else:
                torch.linalg.vector_norm(block, dim=1, out=norm[part])
        return norm.sqrt_() if transposed else norm


def _block(
    stored: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    scaling: float,
    buffer: torch.Tensor | None,
) -> torch.Tensor:
    """stored + scaling·left @ right, in the buffer and its dtype; without one in fp32."""
    if buffer is None:
        product: torch.Tensor = torch.mm(left, right, out_dtype=torch.float32)
        return product.mul_(scaling).add_(stored)
    block = buffer[: len(stored)]
    if stored.dtype == block.dtype:
        return torch.addmm(stored, left, right, alpha=scaling, out=block)
    return block.copy_(stored).addmm_(left, right, alpha=scaling)


def _half_factors(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 matrices whose product is left @ right to within 2^-16.

    Their product runs on tensor cores with fp32 sums; torch has it on CUDA only.
    """
    pairs = [
        (x, y)
        for i, x in enumerate(half_terms(left))
        for j, y in enumerate(half_terms(right))
        if i + j < 2  # The product of both second terms is smaller.
    ]
    return torch.cat([x for x, _ in pairs], 1), torch.cat([y for _, y in pairs], 0)


# A custom operator: torch.compile sees one node.
_operator = torch.library.custom_op(
    "dorad::weight_norm",
    _weight_norm,
    mutates_args=(),
    schema="(Tensor weight, Tensor a, Tensor b, float scaling, int chunk_bytes) -> Tensor",
)


@_operator.register_fake
def _(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, chunk_bytes: int
) -> torch.Tensor:
    dtype = accumulation_dtype(weight.dtype, a.dtype, b.dtype)
    return weight.new_empty(weight.shape[0], dtype=dtype)
