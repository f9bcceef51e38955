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
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from dorad.train import _native, _passes
from dorad.train._compose import inner_scale
from dorad.train._direct import aligned, takes
from dorad.train._norm import epsilon


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
    """[out], in any shape with as many elements."""
    scaling: float


class Forward(NamedTuple):
    """A forward's other results, of all layers."""

    kept: torch.Tensor | None
    """h [rows, ranks], and the layers' inner [rows, out] times inner_scale, each at its place, if
    they are kept; in x's dtype. One tensor, because checkpointing has some calls of Python for
    each. None: neither was."""
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

    sizes: _native.Sizes
    rows: int
    ranks: tuple[int, ...]
    """Columns of h."""
    columns: tuple[int, ...]
    """Of `Forward.scales`."""
    inner: tuple[int, ...]
    """Elements of `Forward.kept`, after h's."""

    def h_of(self, kept: torch.Tensor) -> torch.Tensor:
        """[rows, ranks]."""
        ranks = self.ranks[-1]
        return kept[: self.rows * ranks].view(self.rows, ranks)


def places_of(layers: Sequence[Layer], rows: int) -> Places:
    """The layers' parts of the tensors of a call."""
    return _places(tuple([layer.b.shape for layer in layers]), rows)


# So that every layer's part is aligned as the kernels' fast paths need it.
_ALIGNED = 128


@functools.lru_cache(maxsize=1024)
def _places(shapes: _native.Sizes, rows: int) -> Places:
    def starts(sizes: Iterable[int]) -> tuple[int, ...]:
        return 0, *itertools.accumulate(-(-size // _ALIGNED) * _ALIGNED for size in sizes)

    ranks = (0, *itertools.accumulate(rank for _, rank in shapes))
    h_and_inner = starts([rows * ranks[-1], *(rows * out for out, _ in shapes)])
    return Places(shapes, rows, ranks, starts(out for out, _ in shapes), h_and_inner[1:])


def forward(
    x: torch.Tensor,
    layers: Sequence[Layer],
    scales: torch.Tensor | None,
    ys: Sequence[torch.Tensor],
    *,
    keep_inner: bool,
) -> Forward:
    """Fills `ys` [..., out], contiguous, for x [..., in].

    `scales` has the norms and the g as in `Forward`; None: they are made, only if `makes_norm` of
    every layer.
    """
    x, rows = x.contiguous(), _rows(x)
    places = places_of(layers, rows)
    kept = x.new_empty(places.inner[-1 if keep_inner else 0])
    made = scales is None
    if scales is None:
        scales = x.new_empty(2, places.columns[-1], dtype=torch.float32)
    if x.is_cuda:
        if rows:
            _forward_cuda(x, layers, places, scales, made, ys, kept, keep_inner)
        return Forward(kept, scales)
    h, x = places.h_of(kept), _as_rows(x)
    torch.mm(x, _all_a(layers, x.dtype).t(), out=h)
    for i, layer in enumerate(layers):
        y = ys[i].view(rows, layer.weight.shape[0])
        inner = _inner_of(kept, places, i, y) if keep_inner else None
        _passes.join(
            x,
            layer.weight,
            layer.bias,
            h[:, places.ranks[i] : places.ranks[i + 1]],
            layer.b,
            _scales_of(scales, places.columns[i], layer),
            layer.scaling,
            inner,
            y,
        )
    return Forward(kept, scales)


def _rows(x: torch.Tensor) -> int:
    width = x.shape[-1]
    return x.numel() // width if width else math.prod(x.shape[:-1])


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(_rows(x), x.shape[-1])


def _inner_of(kept: torch.Tensor, places: Places, i: int, like: torch.Tensor) -> torch.Tensor:
    """A layer's [rows, out], as `like`."""
    place = places.inner[i]
    return kept[place : place + like.numel()].view(like.shape)


def _forward_cuda(
    x: torch.Tensor,
    layers: Sequence[Layer],
    places: Places,
    scales: torch.Tensor,
    makes_norms: bool,
    ys: Sequence[torch.Tensor],
    kept: torch.Tensor,
    keep_inner: bool,
) -> None:
    assert _native.library is not None, "the tier is eager without the library"
    norms = scales.data_ptr()
    gs = norms + 4 * places.columns[-1]
    scale = inner_scale(x.dtype)
    if scale != 1:  # Not in bf16, where the library makes norms.
        g = scales[1] / scale
        gs = g.data_ptr()
    start, size = kept.data_ptr(), x.element_size()
    alive: list[object] = []  # until the call
    addresses = []
    for layer, column, place, y in zip(layers, places.columns, places.inner, ys, strict=False):
        m = layer.magnitude.contiguous() if makes_norms else None
        bias = None if layer.bias is None else layer.bias.to(torch.float32)
        alive += m, bias
        to = y.data_ptr()
        addresses.append(
            (
                norms + 4 * column,
                gs + 4 * column,
                start + size * place if keep_inner else to,
                0 if m is None else m.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                to,
                0,
                0,
                0,
            )
        )
    _native.library.linears_forward(
        x,
        _linears(layers, addresses, alive),
        places.sizes,
        places.rows,
        kept,
        epsilon(x.dtype),
        layers[0].a.dtype,
        layers[0].magnitude.dtype if makes_norms else None,
    )


def _linears(
    layers: Sequence[Layer], addresses: Iterable[tuple[int, ...]], alive: list[object]
) -> list[float]:
    """What each layer's struct dorad_linear has: its `addresses` are those from the norm's on.

    What must live until the call is added to `alive`.
    """
    linears: list[float] = []
    for (weight, _, a, b, _, scaling), others in zip(layers, addresses, strict=True):
        a, b, weight = a.contiguous(), b.contiguous(), weight.contiguous()
        alive += a, b, weight
        linears += weight.data_ptr(), a.data_ptr(), b.data_ptr(), *others, *b.shape, scaling
    return linears


def _all_a(layers: Sequence[Layer], dtype: torch.dtype) -> torch.Tensor:
    """The layers' a, [ranks, in]."""
    parts = [layer.a.to(dtype) for layer in layers]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _scales_of(scales: torch.Tensor, column: int, layer: Layer) -> torch.Tensor:
    """A layer's norms and g, [2, out]."""
    return scales[:, column : column + layer.weight.shape[0]]


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
    made: Forward,
    wants_x: bool,
    wanted: Sequence[Wanted],
) -> tuple[torch.Tensor | None, list[Gradients]]:
    """The gradient of x, and those of the layers that are `wanted`, for `grads` of ys [..., out].

    `x` [..., in] is needed for those of a, `made.kept` with h for those of b and with inner for
    those of magnitudes. Sums over rows are made in fp32, in a fixed order. The layers' gradients of
    a may be parts of one tensor.
    """
    grads = [grad.contiguous() for grad in grads]
    first, wants_a = grads[0], any(each.a for each in wanted)
    dtype, factor_dtype = first.dtype, layers[0].a.dtype
    width = layers[0].weight.shape[1]
    if first.numel() == 0:
        d_x = first.new_zeros(*first.shape[:-1], width) if wants_x else None
        return d_x, [_zeros(*pair) for pair in zip(layers, wanted, strict=True)]
    # Sums are in fp32; they are stored so for a wider result, and are rounded once.
    sum_dtype = factor_dtype if factor_dtype in (dtype, torch.float32) else torch.float32
    places = places_of(layers, _rows(first))
    d_x = first.new_empty(*first.shape[:-1], width) if wants_x else None
    d_a = None
    parts: Sequence[torch.Tensor | None] = [None] * len(layers)
    if wants_a:
        d_a = first.new_empty(places.ranks[-1], width, dtype=sum_dtype)
        # One part is the whole: a view would cost the host as much as the allocation.
        parts = [d_a] if len(layers) == 1 else torch.split(d_a, [rank for _, rank in places.sizes])
    found = [
        Gradients(
            part if each.a else None,
            first.new_empty(layer.b.shape, dtype=sum_dtype) if each.b else None,
            torch.empty_like(layer.magnitude) if each.magnitude else None,
        )
        for layer, each, part in zip(layers, wanted, parts, strict=True)
    ]
    x = None if x is None else x.contiguous()
    take = _backward_cuda if first.is_cuda else _backward_cpu
    take(grads, x, layers, places, made, d_x, d_a, found)
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
    made: Forward,
    d_x: torch.Tensor | None,
    d_a: torch.Tensor | None,
    found: Sequence[Gradients],
) -> None:
    assert _native.library is not None, "the tier is eager without the library"
    dtype, sum_dtype = grads[0].dtype, torch.float32
    norms = made.scales.data_ptr()
    gs = norms + 4 * places.columns[-1]
    scale = inner_scale(dtype)
    if scale != 1:
        norm = made.scales[0] * scale
        norms = norm.data_ptr()
    start = 0 if made.kept is None else made.kept.data_ptr()
    size = grads[0].element_size()
    kept: torch.Tensor | None = None
    alive: list[object] = []  # until the call
    addresses = []
    for grad, column, place, (_, d_b, d_magnitude) in zip(
        grads, places.columns, places.inner, found, strict=False
    ):
        if d_b is not None:
            kept, sum_dtype = made.kept, d_b.dtype
        addresses.append(
            (
                norms + 4 * column,
                gs + 4 * column,
                0 if d_magnitude is None else start + size * place,
                0,
                0,
                0,
                grad.data_ptr(),
                0 if d_b is None else d_b.data_ptr(),
                0 if d_magnitude is None else d_magnitude.data_ptr(),
            )
        )
    _native.library.linears_backward(
        None if d_a is None else x,
        _linears(layers, addresses, alive),
        places.sizes,
        places.rows,
        kept,
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
    made: Forward,
    d_x: torch.Tensor | None,
    d_a: torch.Tensor | None,
    found: Sequence[Gradients],
) -> None:
    grads, dtype = list(map(_as_rows, grads)), grads[0].dtype
    ranks = places.ranks
    wants_h = d_x is not None or d_a is not None
    d_h = grads[0].new_empty(places.rows, ranks[-1]) if wants_h else None
    last = None
    for i, (layer, grad) in enumerate(zip(layers, grads, strict=True)):
        norm, g = _scales_of(made.scales, places.columns[i], layer).unbind()
        rank = slice(ranks[i], ranks[i + 1])
        _, d_b, d_magnitude = found[i]
        d_inner = None
        if wants_h or d_b is not None:
            d_inner = torch.empty_like(grad)
        last = d_inner
        inner = None
        if d_magnitude is not None:
            assert made.kept is not None
            inner = _inner_of(made.kept, places, i, grad)
            d_magnitude = d_magnitude.view(-1)
        _passes.scale(grad, inner, g, norm, d_inner, d_magnitude)
        if d_h is not None:
            assert d_inner is not None
            part = d_h[:, rank]
            part.addmm_(d_inner, layer.b.to(dtype), beta=0, alpha=layer.scaling)
        if d_b is not None:
            assert d_inner is not None and made.kept is not None
            h = places.h_of(made.kept)[:, rank]
            d_b.copy_(h.new_empty(d_b.shape).addmm_(d_inner.t(), h, beta=0, alpha=layer.scaling))
    if d_x is not None:
        assert d_h is not None
        d_x = d_x.view(places.rows, -1)
        # The small part first: added to a rounded product it would be lost.
        torch.mm(d_h, _all_a(layers, dtype), out=d_x)
        for layer, grad, column in zip(
            reversed(layers), reversed(grads), reversed(places.columns[:-1]), strict=True
        ):
            d_inner, last = last, None
            if d_inner is None:  # Made again: one at a time takes less memory.
                d_inner = torch.empty_like(grad)
                norm, g = _scales_of(made.scales, column, layer).unbind()
                _passes.scale(grad, None, g, norm, d_inner, None)
            d_x.addmm_(d_inner, layer.weight)
    if d_a is not None:
        assert d_h is not None and x is not None
        d_a.copy_(d_h.t() @ _as_rows(x))


def _zeros(layer: Layer, wanted: Wanted) -> Gradients:
    """The gradients of no rows."""
    return Gradients(
        torch.zeros_like(layer.a) if wanted.a else None,
        torch.zeros_like(layer.b) if wanted.b else None,
        torch.zeros_like(layer.magnitude) if wanted.magnitude else None,
    )
