"""The pass over a linear's output each way on the CPU: see `_products` for the formulas."""

from __future__ import annotations

import functools

import torch

from dorad.train._compose import CHUNK_ELEMENTS, inner_scale
from dorad.train._norm import epsilon

_HALVES = {torch.bfloat16, torch.float16}
# Of a product in half precision at a time: fewer rows would read W too often, and fewer elements
# would be calls more than work.
_HALF_ROWS = 256
_HALF_ELEMENTS = 128 * 1024


def join(
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
    """y and inner from h. `scales` has the norm and g, [2, out]; inner None: it is not kept."""
    b = b.to(x.dtype)
    if bias is not None:
        bias = bias.to(scales.dtype)
    if x.dtype in _HALVES:
        _join_halves(x, weight, bias, h, b, scales, scaling, inner, y)
        return
    to = y if inner is None else inner
    to.addmm_(h, b.t(), beta=0, alpha=scaling).addmm_(x, weight.t())
    g = scales[1]
    for part in _chunks(to):
        rows = to[part]
        y[part] = rows * g if bias is None else torch.addcmul(bias, rows, g)


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
    """y and inner from h; torch rounds products to x's dtype.

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


def scale(
    grad: torch.Tensor,
    inner: torch.Tensor | None,
    g: torch.Tensor,
    norm: torch.Tensor,
    d_inner: torch.Tensor | None,
    d_magnitude: torch.Tensor | None,
) -> None:
    """d_inner = g·grad, and the magnitude's gradient; those that are not None."""
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
