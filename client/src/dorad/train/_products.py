"""A linear with a DoRA adapter, forward and backward: its norm, the products, and one pass over the
output each way.

    norm = ‖W + s·B A‖,  g = m / max(norm, ε)
    h = x Aᵀ,  inner = x Wᵀ + s·h Bᵀ,  y = g·inner + bias
    d_inner = g·dy,  d_m = Σ_rows dy·inner / max(norm, ε),  d_h = s·d_inner B,
    d_x = d_inner W + d_h A,  d_A = d_hᵀ x,  d_B = s·d_innerᵀ h

h is as large as PEFT's, and in fp16 inner is kept as a sixteenth: both stay finite where PEFT's
products do.

On CUDA each way is one call of libdorad_train.so (kernels/train/linear.h), because a torch
operation costs the host as much as a small product costs the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from dorad.train import _native
from dorad.train._compose import CHUNK_ELEMENTS, inner_scale
from dorad.train._direct import aligned, takes
from dorad.train._norm import epsilon

_HALVES = {torch.bfloat16, torch.float16}
# Of a product in half precision at a time: fewer rows would read W too often, and fewer elements
# would be calls more than work.
_HALF_ROWS = 256
_HALF_ELEMENTS = 128 * 1024


class Forward(NamedTuple):
    """A forward's other results: h [rows, rank] and inner [rows, out] in x's dtype."""

    h: torch.Tensor
    inner: torch.Tensor
    """Times inner_scale."""
    scales: torch.Tensor
    """The norm and g, [2, out] in fp32, or fp64 with an fp64 x."""


class Wanted(NamedTuple):
    """Which gradients."""

    x: bool
    a: bool
    b: bool
    magnitude: bool


class Gradients(NamedTuple):
    """The wanted gradients, in the dtypes of x, a, b and the magnitude."""

    x: torch.Tensor | None
    a: torch.Tensor | None
    b: torch.Tensor | None
    magnitude: torch.Tensor | None


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    magnitude: torch.Tensor,
    scaling: float,
    make_scale: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None,
    y: torch.Tensor,
    *,
    keep_inner: bool,
) -> Forward:
    """Fills y [rows, out], contiguous, for x [rows, in]. Unless it must be kept, inner may be y.

    `weight` is [out, in] and `bias` [out] in x's dtype, `a` [rank, in] and `b` [out, rank] in one
    dtype that may be wider. `make_scale` returns the norm and g instead of this function's own;
    None: only if `makes_norm`.
    """
    x, a, b = x.contiguous(), a.contiguous(), b.contiguous()
    weight = weight.contiguous()
    h = x.new_empty(x.shape[0], a.shape[0])
    inner = torch.empty_like(y) if keep_inner else y
    if make_scale is not None:
        scales = torch.stack(make_scale())
    else:
        scales = x.new_empty(2, weight.shape[0], dtype=torch.float32)
    if bias is not None:
        bias = bias.to(scales.dtype)
    norm, g = scales.unbind()
    if x.is_cuda:
        assert _native.library is not None, "the tier is eager without the library"
        made = None if make_scale is not None else magnitude.contiguous()
        if inner.numel():
            scale = inner_scale(x.dtype)  # Of a library's own norms, in bf16, it is 1.
            _native.library.linear_forward(
                *(x, weight, a, b, made, bias, norm, g if scale == 1 else g / scale, h, inner, y),
                scaling,
                epsilon(x.dtype),
            )
        return Forward(h, inner, scales)
    a, b = a.to(x.dtype), b.to(x.dtype)
    torch.mm(x, a.t(), out=h)
    if x.dtype in _HALVES:
        _join_halves(x, weight, bias, h, b, scales, scaling, inner if keep_inner else None, y)
        return Forward(h, inner, scales)
    inner.addmm_(h, b.t(), beta=0, alpha=scaling).addmm_(x, weight.t())
    for part in _chunks(inner):
        rows = inner[part]
        y[part] = rows * g if bias is None else torch.addcmul(bias, rows, g)
    return Forward(h, inner, scales)


def _join_halves(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    h: torch.Tensor,
    b: torch.Tensor,
    scales: torch.Tensor,
    scaling: float,
    inner: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    """y and inner from h on the CPU, where torch rounds products to x's dtype.

    A rounded x Wᵀ times a g near 1, or with a small s·h Bᵀ, is rounded to itself again: both would
    be lost. So a known dither of about the last place goes into the product and is subtracted
    after the rounding: the error is as large as without it, but what is left is no multiple of the
    last place, and the rounding of y keeps g and s·h Bᵀ on average over the rows.
    """
    norm, g = scales.unbind()
    dtype, (rows, out) = x.dtype, y.shape
    step = max(1, min(rows, max(_HALF_ROWS, _HALF_ELEMENTS // max(1, out))))
    scale, numbers = inner_scale(dtype), torch.finfo(dtype)
    # No product is far above ‖x‖·‖W + s·B A‖: that one's last place dithers all smaller ones.
    across = (_columns(out) * norm).mul_(scale * numbers.eps / 2).to(dtype)
    down = _rows(x).to(dtype)[:, None]
    half = x.new_empty(step, out)
    wide = g.new_empty(step, out)
    g = g if scale == 1 else g / scale
    for begin in range(0, rows, step):
        part = slice(begin, begin + step)
        product = y[part]
        total, buffer = wide[: len(product)], half[: len(product)]
        torch.mul(down[part], across, out=buffer)
        if dtype == torch.float16:  # It may be beyond, even infinite; no number's last place is.
            buffer.nan_to_num_(0.0).clamp_(-numbers.max * numbers.eps, numbers.max * numbers.eps)
        torch.addmm(buffer, x[part], weight.t(), alpha=scale, out=product)
        total.copy_(product).sub_(buffer)
        torch.mm(h[part], b.t(), out=buffer)
        total.add_(buffer, alpha=scale * scaling)
        if inner is not None:
            inner[part] = total
        total.mul_(g)
        product.copy_(total if bias is None else total.add_(bias))


@functools.lru_cache(maxsize=64)
def _columns(count: int) -> torch.Tensor:
    """[count], even within ±[0.5, 1], without a period, the same each time; for reading.

    On the CPU, also where another device is torch's default.
    """
    numbers = torch.arange(count, dtype=torch.float32, device="cpu")
    return _signed(numbers.mul_(0.5698402909980532))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """‖x‖ of each row times a number within ±[0.5, 1] that depends on the row alone.

    So a row has the same results wherever it stands in a batch.
    """
    lengths: torch.Tensor = torch.linalg.vector_norm(x, dim=1, dtype=torch.float32)
    return lengths * _signed(lengths.frexp().mantissa.mul_(2**14))


def _signed(values: torch.Tensor) -> torch.Tensor:
    """The fractional parts of values above 0 as numbers within ±[0.5, 1]."""
    values = values.frac_().sub_(0.5)
    return values + values.sign() / 2


def makes_norm(
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    magnitude: torch.Tensor,
    scaling: float,
) -> bool:
    """Whether the kernels of `forward` compute this layer's norm and g."""
    if not weight.is_cuda or not weight.is_contiguous() or magnitude.dtype not in _MAGNITUDES:
        return False
    if not takes(weight, a, b, scaling):
        return False
    # Others are converted into aligned memory.
    return a.dtype != torch.bfloat16 or aligned(a, b)


_MAGNITUDES = {torch.float32, torch.bfloat16}


def backward(
    grad: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scales: torch.Tensor,
    h: torch.Tensor | None,
    inner: torch.Tensor | None,
    scaling: float,
    magnitude_dtype: torch.dtype,
    wanted: Wanted,
) -> Gradients:
    """The gradients that are `wanted`, for a `grad` of y [rows, out]; the magnitude's is [out].

    `x` is needed for that of a, `h` for that of b and `inner` for the magnitude's. Sums over rows
    are made in fp32, in a fixed order.
    """
    grad, weight, a, b = grad.contiguous(), weight.contiguous(), a.contiguous(), b.contiguous()
    x = None if x is None else x.contiguous()
    if grad.numel() == 0:
        return _zeros(grad, weight, a, b, magnitude_dtype, wanted)
    norm, g = scales.unbind()
    dtype = grad.dtype
    # Sums are in fp32; they are stored so for a wider result, and are rounded once.
    sum_dtype = a.dtype if a.dtype in (dtype, torch.float32) else torch.float32
    products = wanted.x or wanted.a or wanted.b
    d_inner = torch.empty_like(grad) if products else None
    d_h = grad.new_empty(grad.shape[0], a.shape[0]) if wanted.x or wanted.a else None
    d_x = grad.new_empty(grad.shape[0], weight.shape[1]) if wanted.x else None
    d_a = torch.empty_like(a, dtype=sum_dtype) if wanted.a else None
    d_b = torch.empty_like(b, dtype=sum_dtype) if wanted.b else None
    d_magnitude = g.new_empty(g.shape, dtype=magnitude_dtype) if wanted.magnitude else None
    scale = inner_scale(dtype)
    if grad.is_cuda:
        assert _native.library is not None, "the tier is eager without the library"
        _native.library.linear_backward(
            grad,
            x if wanted.a else None,
            *(weight, a, b, norm if scale == 1 else norm * scale, g),
            h if wanted.b else None,
            inner if wanted.magnitude else None,
            *(d_inner, d_h, d_x, d_a, d_b, d_magnitude),
            scaling,
            epsilon(dtype) * scale,
            sum_dtype,
        )
    else:
        _scaled(grad, inner, g, norm, d_inner, d_magnitude)
        if d_h is not None:
            assert d_inner is not None
            d_h.addmm_(d_inner, b.to(dtype), beta=0, alpha=scaling)
        if d_x is not None:
            assert d_inner is not None and d_h is not None
            torch.mm(d_h, a.to(dtype), out=d_x).addmm_(d_inner, weight)
        if d_a is not None:
            assert d_h is not None and x is not None
            d_a.copy_(d_h.t() @ x)
        if d_b is not None:
            assert d_inner is not None and h is not None
            d_b.copy_(h.new_empty(d_b.shape).addmm_(d_inner.t(), h, beta=0, alpha=scaling))
    if sum_dtype != a.dtype:
        d_a = None if d_a is None else d_a.to(a.dtype)
        d_b = None if d_b is None else d_b.to(b.dtype)
    return Gradients(d_x, d_a, d_b, d_magnitude)


def _scaled(
    grad: torch.Tensor,
    inner: torch.Tensor | None,
    g: torch.Tensor,
    norm: torch.Tensor,
    d_inner: torch.Tensor | None,
    d_magnitude: torch.Tensor | None,
) -> None:
    """d_inner = g·grad, and the magnitude's gradient."""
    sums = torch.zeros_like(g)
    for part in _chunks(grad):
        rows = grad[part].to(g.dtype)
        if d_inner is not None:
            d_inner[part] = rows * g
        if d_magnitude is not None:
            assert inner is not None
            sums += (rows * inner[part]).sum(0)
    if d_magnitude is not None:
        d_magnitude.copy_(sums / (norm.clamp_min(epsilon(grad.dtype)) * inner_scale(grad.dtype)))


def _chunks(tensor: torch.Tensor) -> list[slice]:
    rows, out = tensor.shape
    step = max(1, CHUNK_ELEMENTS // max(1, out))
    return [slice(begin, begin + step) for begin in range(0, rows, step)]


def _zeros(
    grad: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    magnitude_dtype: torch.dtype,
    wanted: Wanted,
) -> Gradients:
    """The gradients of no rows."""
    return Gradients(
        grad.new_zeros(grad.shape[0], weight.shape[1]) if wanted.x else None,
        torch.zeros_like(a) if wanted.a else None,
        torch.zeros_like(b) if wanted.b else None,
        grad.new_zeros(weight.shape[0], dtype=magnitude_dtype) if wanted.magnitude else None,
    )
