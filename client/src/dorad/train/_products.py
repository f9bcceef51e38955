"""Linears with DoRA adapters that have one input, forward and backward: their norms, the products,
and one pass over each output each way.

    norm = ‖W + s·B A‖,  g = m / max(norm, ε)
    h = x Aᵀ,  inner = x Wᵀ + s·h Bᵀ,  y = g·inner + bias
    d_inner = g·dy,  d_m = Σ_rows dy·inner / max(norm, ε),  d_h = s·d_inner B,
    d_x = Σ_layers (d_inner W + d_h A),  d_A = d_hᵀ x,  d_B = s·d_innerᵀ h

h is as large as PEFT's, and in fp16 inner is kept as a sixteenth: both stay finite where PEFT's
products do.

On CUDA each way is one call of libdorad_train.so (kernels/train/linear.h), because a torch
operation costs the host as much as a small product costs the device.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
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


class Layer(NamedTuple):
    """One of the linears. Detached."""

    weight: torch.Tensor
    """[out, in], in x's dtype."""
    bias: torch.Tensor | None
    """[out]."""
    a: torch.Tensor
    """[rank, in], as b in a dtype that may be wider than x's."""
    b: torch.Tensor
    """[out, rank]."""
    magnitude: torch.Tensor
    """[out]."""
    scaling: float


class Forward(NamedTuple):
    """A forward's other results, of all layers."""

    h: torch.Tensor
    """[rows, ranks], in x's dtype."""
    inner: torch.Tensor | None
    """The layers' [rows, out], each at its place, times inner_scale, in x's dtype. None: not
    kept."""
    scales: torch.Tensor
    """The norms and the g, [2, columns] in fp32, or fp64 with an fp64 x, each layer's at its
    place."""


class Wanted(NamedTuple):
    """Which gradients of a layer."""

    a: bool
    b: bool
    magnitude: bool


class Gradients(NamedTuple):
    """A layer's wanted gradients, in the dtypes of a, b and the magnitude."""

    a: torch.Tensor | None
    b: torch.Tensor | None
    magnitude: torch.Tensor | None


class Places(NamedTuple):
    """The layers' first elements, and the numbers of all elements."""

    ranks: tuple[int, ...]
    """Columns of h."""
    columns: tuple[int, ...]
    """Of `Forward.scales`."""
    inner: tuple[int, ...]
    """Elements of `Forward.inner`."""


def places_of(layers: Sequence[Layer], rows: int) -> Places:
    """The layers' parts of the tensors of a call."""
    return _places(tuple(layer.b.shape for layer in layers), rows)


# So that every layer's part is aligned as the kernels' fast paths need it.
_ALIGNED = 128


@functools.lru_cache(maxsize=1024)
def _places(shapes: tuple[tuple[int, int], ...], rows: int) -> Places:
    def starts(sizes: Iterable[int]) -> tuple[int, ...]:
        return 0, *itertools.accumulate(-(-size // _ALIGNED) * _ALIGNED for size in sizes)

    return Places(
        (0, *itertools.accumulate(rank for _, rank in shapes)),
        starts(out for out, _ in shapes),
        starts(rows * out for out, _ in shapes),
    )


def forward(
    x: torch.Tensor,
    layers: Sequence[Layer],
    scales: torch.Tensor | None,
    ys: Sequence[torch.Tensor],
    *,
    keep_inner: bool,
) -> Forward:
    """Fills `ys` [rows, out], contiguous, for x [rows, in].

    `scales` has the norms and the g as in `Forward`; None: they are made, only if `makes_norm` of
    every layer.
    """
    x = x.contiguous()
    rows = x.shape[0]
    places = places_of(layers, rows)
    h = x.new_empty(rows, places.ranks[-1])
    inner = x.new_empty(places.inner[-1]) if keep_inner else None
    made = scales is None
    if scales is None:
        scales = x.new_empty(2, places.columns[-1], dtype=torch.float32)
    if x.is_cuda:
        if rows:
            _forward_cuda(x, layers, places, scales, made, ys, h, inner)
        return Forward(h, inner, scales)
    parts = [layer.a.to(x.dtype) for layer in layers]
    torch.mm(x, (parts[0] if len(parts) == 1 else torch.cat(parts)).t(), out=h)
    for i, layer in enumerate(layers):
        column, place = places.columns[i], places.inner[i]
        kept = None if inner is None else inner[place : place + ys[i].numel()].view(ys[i].shape)
        _join(
            x,
            layer,
            h[:, places.ranks[i] : places.ranks[i + 1]],
            scales[:, column : column + layer.weight.shape[0]],
            kept,
            ys[i],
        )
    return Forward(h, inner, scales)


def _forward_cuda(
    x: torch.Tensor,
    layers: Sequence[Layer],
    places: Places,
    scales: torch.Tensor,
    makes_norms: bool,
    ys: Sequence[torch.Tensor],
    h: torch.Tensor,
    inner: torch.Tensor | None,
) -> None:
    assert _native.library is not None, "the tier is eager without the library"
    scale = inner_scale(x.dtype)  # Of a library's own norms, in bf16, it is 1.
    g = scales[1] if scale == 1 else scales[1] / scale
    norms, gs = scales.data_ptr(), g.data_ptr()
    kept = None if inner is None else inner.data_ptr()
    size = x.element_size()
    alive, linears = [], []
    for layer, column, place, y in zip(layers, places.columns, places.inner, ys, strict=False):
        a, b, weight = layer.a.contiguous(), layer.b.contiguous(), layer.weight.contiguous()
        m = layer.magnitude.contiguous() if makes_norms else None
        bias = None if layer.bias is None else layer.bias.to(torch.float32)
        alive.append((a, b, weight, m, bias))  # until the call
        to = y.data_ptr()
        linears.append(
            _native.Linear(
                weight.data_ptr(),
                a.data_ptr(),
                b.data_ptr(),
                norms + 4 * column,
                gs + 4 * column,
                to if kept is None else kept + size * place,
                0 if m is None else m.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                to,
                0,
                0,
                0,
                b.shape[0],
                b.shape[1],
                layer.scaling,
            )
        )
    _native.library.linears_forward(
        x, linears, h, epsilon(x.dtype), layers[0].a.dtype, layers[0].magnitude.dtype
    )


def _join(
    x: torch.Tensor,
    layer: Layer,
    h: torch.Tensor,
    scales: torch.Tensor,
    inner: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    """y and inner of a layer from h on the CPU."""
    b, bias = layer.b.to(x.dtype), layer.bias
    if bias is not None:
        bias = bias.to(scales.dtype)
    if x.dtype in _HALVES:
        _join_halves(x, layer.weight, bias, h, b, scales, layer.scaling, inner, y)
        return
    to = y if inner is None else inner
    to.addmm_(h, b.t(), beta=0, alpha=layer.scaling).addmm_(x, layer.weight.t())
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


def makes_norm(layer: Layer) -> bool:
    """Whether the kernels of `forward` compute this layer's norm and g."""
    weight, _, a, b, magnitude, scaling = layer
    if not weight.is_cuda or not weight.is_contiguous() or magnitude.dtype not in _MAGNITUDES:
        return False
    if not takes(weight, a, b, scaling):
        return False
    # Others are converted into aligned memory.
    return a.dtype != torch.bfloat16 or aligned(a, b)


_MAGNITUDES = {torch.float32, torch.bfloat16}


def backward(
    grads: Sequence[torch.Tensor],
    x: torch.Tensor | None,
    layers: Sequence[Layer],
    kept: Forward,
    wants_x: bool,
    wanted: Sequence[Wanted],
) -> tuple[torch.Tensor | None, list[Gradients]]:
    """The gradient of x, and those of the layers that are `wanted`, for `grads` of ys [rows, out].

    `x` is needed for those of a, h for those of b and inner for those of magnitudes, which are
    [out]. Sums over rows are made in fp32, in a fixed order. The layers' gradients of a may be
    parts of one tensor.
    """
    grads = [grad.contiguous() for grad in grads]
    first, wants_a = grads[0], any(each.a for each in wanted)
    rows, dtype, factor_dtype = first.shape[0], first.dtype, layers[0].a.dtype
    width = layers[0].weight.shape[1]
    if first.numel() == 0:
        d_x = first.new_zeros(rows, width) if wants_x else None
        return d_x, [_zeros(*pair) for pair in zip(layers, wanted, strict=True)]
    # Sums are in fp32; they are stored so for a wider result, and are rounded once.
    sum_dtype = factor_dtype if factor_dtype in (dtype, torch.float32) else torch.float32
    places = places_of(layers, rows)
    ranks = places.ranks
    d_x = first.new_empty(rows, width) if wants_x else None
    d_a = first.new_empty(ranks[-1], width, dtype=sum_dtype) if wants_a else None
    found = [
        Gradients(
            None if d_a is None or not each.a else d_a[ranks[i] : ranks[i + 1]],
            first.new_empty(layer.b.shape, dtype=sum_dtype) if each.b else None,
            torch.empty_like(layer.magnitude) if each.magnitude else None,
        )
        for i, (layer, each) in enumerate(zip(layers, wanted, strict=True))
    ]
    x = None if x is None else x.contiguous()
    take = _backward_cuda if first.is_cuda else _backward_cpu
    take(grads, x, layers, places, kept, d_x, d_a, found)
    if sum_dtype != factor_dtype:
        found = [
            Gradients(
                None if each.a is None else each.a.to(factor_dtype),
                None if each.b is None else each.b.to(factor_dtype),
                each.magnitude,
            )
            for each in found
        ]
    return d_x, found


def _backward_cuda(
    grads: Sequence[torch.Tensor],
    x: torch.Tensor | None,
    layers: Sequence[Layer],
    places: Places,
    kept: Forward,
    d_x: torch.Tensor | None,
    d_a: torch.Tensor | None,
    found: Sequence[Gradients],
) -> None:
    assert _native.library is not None, "the tier is eager without the library"
    dtype, sum_dtype = grads[0].dtype, torch.float32
    scale = inner_scale(dtype)
    norm = kept.scales[0] if scale == 1 else kept.scales[0] * scale
    norms, gs = norm.data_ptr(), kept.scales[1].data_ptr()
    inner = 0 if kept.inner is None else kept.inner.data_ptr()
    size = grads[0].element_size()
    alive, linears = [], []
    for i, (layer, column) in enumerate(zip(layers, places.columns, strict=False)):
        a, b, weight = layer.a.contiguous(), layer.b.contiguous(), layer.weight.contiguous()
        alive.append((a, b, weight))  # until the call
        _, d_b, d_magnitude = found[i]
        sum_dtype = sum_dtype if d_b is None else d_b.dtype
        linears.append(
            _native.Linear(
                weight.data_ptr(),
                a.data_ptr(),
                b.data_ptr(),
                norms + 4 * column,
                gs + 4 * column,
                0 if d_magnitude is None else inner + size * places.inner[i],
                0,
                0,
                0,
                grads[i].data_ptr(),
                0 if d_b is None else d_b.data_ptr(),
                0 if d_magnitude is None else d_magnitude.data_ptr(),
                b.shape[0],
                b.shape[1],
                layer.scaling,
            )
        )
    _native.library.linears_backward(
        None if d_a is None else x,
        linears,
        kept.h if any(each.b is not None for each in found) else None,
        d_x,
        d_a,
        grads[0],
        epsilon(dtype) * scale,
        layers[0].weight.shape[1],
        layers[0].a.dtype,
        layers[0].magnitude.dtype,
        sum_dtype if d_a is None else d_a.dtype,
    )


def _backward_cpu(
    grads: Sequence[torch.Tensor],
    x: torch.Tensor | None,
    layers: Sequence[Layer],
    places: Places,
    kept: Forward,
    d_x: torch.Tensor | None,
    d_a: torch.Tensor | None,
    found: Sequence[Gradients],
) -> None:
    rows, dtype = grads[0].shape[0], grads[0].dtype
    ranks = places.ranks
    wants_h = d_x is not None or d_a is not None
    d_h = grads[0].new_empty(rows, ranks[-1]) if wants_h else None
    last = None
    for i, (layer, grad) in enumerate(zip(layers, grads, strict=True)):
        column, place = places.columns[i], places.inner[i]
        norm, g = kept.scales[:, column : column + grad.shape[1]].unbind()
        rank = slice(ranks[i], ranks[i + 1])
        _, d_b, d_magnitude = found[i]
        d_inner = None
        if wants_h or d_b is not None:
            d_inner = torch.empty_like(grad)
        last = d_inner
        inner = None
        if d_magnitude is not None:
            assert kept.inner is not None
            inner = kept.inner[place : place + grad.numel()].view(grad.shape)
        _scaled(grad, inner, g, norm, d_inner, d_magnitude)
        if d_h is not None:
            assert d_inner is not None
            part = d_h[:, rank]
            part.addmm_(d_inner, layer.b.to(dtype), beta=0, alpha=layer.scaling)
        if d_b is not None:
            assert d_inner is not None
            h = kept.h[:, rank]
            d_b.copy_(h.new_empty(d_b.shape).addmm_(d_inner.t(), h, beta=0, alpha=layer.scaling))
    if d_x is not None:
        assert d_h is not None
        parts = [layer.a.to(dtype) for layer in layers]
        # The small part first: added to a rounded product it would be lost.
        torch.mm(d_h, parts[0] if len(parts) == 1 else torch.cat(parts), out=d_x)
        for layer, grad, column in zip(
            reversed(layers), reversed(grads), reversed(places.columns[:-1]), strict=True
        ):
            d_inner, last = last, None
            if d_inner is None:  # Made again: one at a time takes less memory.
                d_inner = torch.empty_like(grad)
                norm, g = kept.scales[:, column : column + grad.shape[1]].unbind()
                _scaled(grad, None, g, norm, d_inner, None)
            d_x.addmm_(d_inner, layer.weight)
    if d_a is not None:
        assert d_h is not None and x is not None
        d_a.copy_(d_h.t() @ x)


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


def _zeros(layer: Layer, wanted: Wanted) -> Gradients:
    """The gradients of no rows."""
    return Gradients(
        torch.zeros_like(layer.a) if wanted.a else None,
        torch.zeros_like(layer.b) if wanted.b else None,
        torch.zeros_like(layer.magnitude) if wanted.magnitude else None,
    )
