"""The compose of DoRA, (g - 1)·base + g·(s·lora), and its backward.

The fused tiers are two kernels for each device. torch.compile sees them as custom operators; else
an autograd function calls them directly.

All tiers compute t = s·lora, u = g·t, v = (g - 1)·base and v + u in fp32 (fp64 for fp64 inputs)
and round once, to the output's dtype. Near g = 1 the equal g·(base + t) - base would cancel, and
g - 1 would vanish in half precision: g is never rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from dorad.train import _native, _tiers
from dorad.train._dispatch import transformed, watched
from dorad.train._norm import accumulation_dtype


def inner_scale(dtype: torch.dtype) -> float:
    """The factor of an inner that is kept for the backward in `dtype`.

    base + s·lora may be beyond fp16 where both products are within it.
    """
    return 2.0**-4 if dtype == torch.float16 else 1.0


# On the CPU rows are taken in chunks that stay in the cache between the passes over them.
CHUNK_ELEMENTS = 256 * 1024


def compose(
    base: torch.Tensor, lora: torch.Tensor, g: torch.Tensor, scaling: float
) -> torch.Tensor:
    """(g - 1)·base + g·scaling·lora, of base's shape [..., out] and the wider dtype of the two.

    `base` has no bias, `lora` is B(A(x)) unscaled, `g` is [out] in fp32, or fp64 with fp64 inputs.
    The tier is `_tiers.choose`'s. Raises ValueError when shapes, devices or g's dtype do not fit.
    """
    out = base.shape[-1]
    if lora.shape != base.shape or g.shape != (out,):
        raise ValueError(
            f"base is {list(base.shape)}: lora must be the same, not {list(lora.shape)},"
            f" and g [{out}], not {list(g.shape)}"
        )
    if not base.device == lora.device == g.device:
        raise ValueError(f"base is on {base.device}, lora on {lora.device} and g on {g.device}")
    if g.dtype != accumulation_dtype(base.dtype, lora.dtype):
        raise ValueError(f"g is {g.dtype} with base in {base.dtype} and lora in {lora.dtype}")
    record = torch.is_grad_enabled()
    chosen = _tiers.choose(
        base.numel() // max(1, out),
        out,
        device=base.device,
        dtype=torch.promote_types(base.dtype, lora.dtype),
        training=record and (base.requires_grad or lora.requires_grad or g.requires_grad),
    )
    if chosen.tier == _tiers.Tier.EAGER or transformed():
        return compose_eager(base, lora, g, scaling)
    want_inner = record and g.requires_grad
    delta: torch.Tensor
    if watched(base, lora, g):
        delta, _ = _operator(base, lora, g, scaling, want_inner)
    elif chosen.tier == _tiers.Tier.FUSED_BACKWARD:
        delta = _Fused.apply(base, lora, g, scaling, want_inner)  # type: ignore[no-untyped-call]
    else:
        delta, _ = _compose(base, lora, g, scaling, want_inner)
    return delta


def compose_eager(
    base: torch.Tensor, lora: torch.Tensor, g: torch.Tensor, scaling: float
) -> torch.Tensor:
    """The same in plain torch operations. `g` may be of any shape that broadcasts with `base`."""
    # The compiler itself decides which tensors to save. (And torch 2.11 traces an autograd.Function
    # whose forward ends in a cast that changes nothing to one with gradients of zero.) Transforms
    # need operators that can be differentiated again.
    # And a function of our own is slower where the activations are small.
    record = torch.is_grad_enabled()
    if not record or _tiers.is_small(base.device, base.numel()) or watched(base, lora, g):
        return _plain(base, lora, g, scaling)[0]
    want_inner = g.requires_grad
    delta: torch.Tensor = _Eager.apply(  # type: ignore[no-untyped-call]
        base, lora, g, scaling, want_inner
    )
    return delta


def _plain(
    base: torch.Tensor, lora: torch.Tensor, g: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(delta, t)."""
    if base.dtype == lora.dtype == g.dtype:
        t = lora * scaling
        return (g - 1) * base + g * t, t
    t = lora.to(g.dtype) * scaling
    return ((g - 1) * base + g * t).to(torch.promote_types(base.dtype, lora.dtype)), t


class _Eager(torch.autograd.Function):
    """Saves the same tensors as the fused tier: autograd alone would save both operands, one in
    fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        base: torch.Tensor,
        lora: torch.Tensor,
        g: torch.Tensor,
        scaling: float,
        want_inner: bool,
    ) -> torch.Tensor:
        delta, t = _plain(base, lora, g, scaling)
        kept = []
        if want_inner:
            scale = inner_scale(delta.dtype)
            inner = base + t
            kept = [(inner if scale == 1 else inner * scale).to(delta.dtype)]
        ctx.save_for_backward(g, *kept)
        ctx.scaling = scaling
        return delta

    # The saved tensors have no graph back to base and lora.
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        for_base, for_lora, for_g = ctx.needs_input_grad[:3]
        g, *kept = ctx.saved_tensors
        d_base = ((g - 1) * grad).to(grad.dtype) if for_base else None
        d_lora = ((g * ctx.scaling) * grad).to(grad.dtype) if for_lora else None
        d_g = None
        if for_g:
            d_g = (grad * kept[0].to(g.dtype)).sum_to_size(g.shape) / inner_scale(grad.dtype)
        return d_base, d_lora, d_g, None, None


def _compose(
    base: torch.Tensor, lora: torch.Tensor, g: torch.Tensor, scaling: float, want_inner: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(delta, inner) of [..., out]; inner = inner_scale·(base + s·lora) for d_g, else empty."""
    kernel = _compose_cuda if base.is_cuda else _compose_cpu
    return kernel(base, lora, g, scaling, want_inner)


def _compose_cpu(
    base: torch.Tensor, lora: torch.Tensor, g: torch.Tensor, scaling: float, want_inner: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    outputs = _outputs(base, lora, want_inner)
    base, lora, delta = (_rows(tensor, g) for tensor in (base, lora, outputs[0]))
    inner = _rows(outputs[1], g) if want_inner else None
    rows, out = base.shape
    step = max(1, CHUNK_ELEMENTS // max(1, out))
    buffers = g.new_empty(2, min(step, rows), out)
    excess = g - 1
    scale = inner_scale(delta.dtype)
    for begin in range(0, rows, step):
        part = slice(begin, begin + step)
        x, y = base[part], lora[part]
        t, v = buffers[:, : len(x)]
        _multiply(y, scaling, t)
        if inner is not None and scale == 1:
            _store(torch.add, x, t, inner[part], v)
        elif inner is not None:
            inner[part] = torch.add(x, t, out=v).mul_(scale)
        t.mul_(g)
        _multiply(x, excess, v)
        _store(torch.add, v, t, delta[part], v)
    return outputs


def _rows(tensor: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """[rows, out] of [..., out]: a view when the tensor is contiguous."""
    out = len(g)
    return tensor.reshape(tensor.numel() // max(1, out), out)


def _multiply(narrow: torch.Tensor, factor: torch.Tensor | float, out: torch.Tensor) -> None:
    """out = narrow·factor in out's dtype: a plain product would round to the narrow one first."""
    if narrow.dtype == out.dtype:
        torch.mul(narrow, factor, out=out)
    else:
        out.copy_(narrow).mul_(factor)


def _store(
    operation: Callable[..., torch.Tensor],
    first: torch.Tensor,
    second: torch.Tensor,
    target: torch.Tensor,
    buffer: torch.Tensor,
) -> None:
    """target = operation(first, second), computed in the buffer's dtype."""
    if target.dtype == buffer.dtype:
        operation(first, second, out=target)
    else:
        target.copy_(operation(first, second, out=buffer))


def _outputs(
    base: torch.Tensor, lora: torch.Tensor, want_inner: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.promote_types(base.dtype, lora.dtype)
    delta = base.new_empty(base.shape, dtype=dtype)
    return delta, base.new_empty(base.shape if want_inner else (0,), dtype=dtype)


def _compose_cuda(
    base: torch.Tensor, lora: torch.Tensor, g: torch.Tensor, scaling: float, want_inner: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    assert _native.library is not None, "the tier is eager without the library"
    delta, inner = _outputs(base, lora, want_inner)
    base, lora = base.to(delta.dtype).contiguous(), lora.to(delta.dtype).contiguous()
    scale = inner_scale(delta.dtype)
    kernels_inner = inner if want_inner and scale == 1 else None
    if delta.numel():
        _native.library.forward(base, lora, g.contiguous(), delta, kernels_inner, scaling)
    if want_inner and scale != 1:
        torch.add(base * scale, lora, alpha=scaling * scale, out=inner)
    return delta, inner


_operator = torch.library.custom_op(
    "dorad::compose",
    _compose,
    mutates_args=(),
    device_types=("cpu", "cuda"),
    schema="(Tensor base, Tensor lora, Tensor g, float scaling, bool want_inner)"
    " -> (Tensor, Tensor)",
)


@_operator.register_fake
def _(
    base: torch.Tensor, lora: torch.Tensor, g: torch.Tensor, scaling: float, want_inner: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return _outputs(base, lora, want_inner)


def _compose_backward(
    grad: torch.Tensor,
    inner: torch.Tensor,
    g: torch.Tensor,
    scaling: float,
    for_base: bool,
    for_lora: bool,
    for_g: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(d_base, d_lora, d_g), empty where not requested. d_g sums in a fixed order."""
    kernel = _compose_backward_cuda if grad.is_cuda else _compose_backward_cpu
    return kernel(grad, inner, g, scaling, for_base, for_lora, for_g)


def _compose_backward_cpu(
    grad: torch.Tensor,
    inner: torch.Tensor,
    g: torch.Tensor,
    scaling: float,
    for_base: bool,
    for_lora: bool,
    for_g: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    d_base, d_lora, d_g = gradients = _gradients(grad, g, for_base, for_lora, for_g)
    grad = _rows(grad, g)
    d_base = _rows(d_base, g) if for_base else d_base
    d_lora = _rows(d_lora, g) if for_lora else d_lora
    inner = _rows(inner, g) if for_g else inner
    rows, out = grad.shape
    step = max(1, CHUNK_ELEMENTS // max(1, out))
    buffers = g.new_empty(2, min(step, rows), out)
    excess, scaled = g - 1, g * scaling
    if for_g:
        d_g.zero_()
    for begin in range(0, rows, step):
        part = slice(begin, begin + step)
        y, v = buffers[:, : len(grad[part])]
        y.copy_(grad[part])
        if for_base:
            _store(torch.mul, y, excess, d_base[part], v)
        if for_lora:
            _store(torch.mul, y, scaled, d_lora[part], v)
        if for_g:
            d_g += torch.mul(y, inner[part], out=v).sum(0)
    d_g /= inner_scale(grad.dtype)
    return gradients


def _gradients(
    grad: torch.Tensor, g: torch.Tensor, for_base: bool, for_lora: bool, for_g: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    d_base = grad.new_empty(grad.shape if for_base else (0,))
    d_lora = grad.new_empty(grad.shape if for_lora else (0,))
    return d_base, d_lora, g.new_empty(g.shape if for_g else (0,))


def _compose_backward_cuda(
    grad: torch.Tensor,
    inner: torch.Tensor,
    g: torch.Tensor,
    scaling: float,
    for_base: bool,
    for_lora: bool,
    for_g: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert _native.library is not None, "the tier is eager without the library"
    d_base, d_lora, d_g = _gradients(grad, g, for_base, for_lora, for_g)
    if grad.numel() == 0:
        return d_base, d_lora, d_g.zero_()
    _native.library.backward(
        grad.contiguous(),
        inner.contiguous() if for_g else None,
        g.contiguous(),
        d_base if for_base else None,
        d_lora if for_lora else None,
        d_g if for_g else None,
        scaling,
    )
    scale = inner_scale(grad.dtype)
    return d_base, d_lora, d_g if scale == 1 else d_g.div_(scale)


_backward_operator = torch.library.custom_op(
    "dorad::compose_backward",
    _compose_backward,
    mutates_args=(),
    device_types=("cpu", "cuda"),
    schema="(Tensor grad, Tensor inner, Tensor g, float scaling, bool for_base, bool for_lora,"
    " bool for_g) -> (Tensor, Tensor, Tensor)",
)


@_backward_operator.register_fake
def _(
    grad: torch.Tensor,
    inner: torch.Tensor,
    g: torch.Tensor,
    scaling: float,
    for_base: bool,
    for_lora: bool,
    for_g: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _gradients(grad, g, for_base, for_lora, for_g)


def _setup_context(
    ctx: Any,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, float, bool],
    output: tuple[torch.Tensor, torch.Tensor],
) -> None:
    _, _, g, scaling, want_inner = inputs
    ctx.save_for_backward(g, *(output[1:] if want_inner else ()))
    ctx.set_materialize_grads(False)  # inner has no gradient.
    ctx.scaling = scaling


def _backward(ctx: Any, grad: torch.Tensor | None, _: object) -> tuple[torch.Tensor | None, ...]:
    if grad is None:
        return None, None, None, None, None
    return _given(ctx, grad, _backward_operator)


def _given(
    ctx: Any,
    grad: torch.Tensor,
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor | None, ...]:
    """The requested gradients of compose's five arguments."""
    for_base, for_lora, for_g = ctx.needs_input_grad[:3]
    g, *kept = ctx.saved_tensors
    if for_g and not kept:
        raise RuntimeError("dorad::compose was called without want_inner, and g needs a gradient")
    inner = kept[0] if for_g else g  # g as a placeholder: it is not read
    d_base, d_lora, d_g = backward(grad, inner, g, ctx.scaling, for_base, for_lora, for_g)
    return (
        d_base if for_base else None,
        d_lora if for_lora else None,
        d_g if for_g else None,
        None,
        None,
    )


_operator.register_autograd(_backward, setup_context=_setup_context)


class _Fused(torch.autograd.Function):
    """The operator's kernels without the operator."""

    @staticmethod
    def forward(
        ctx: Any,
        base: torch.Tensor,
        lora: torch.Tensor,
        g: torch.Tensor,
        scaling: float,
        want_inner: bool,
    ) -> torch.Tensor:
        delta, inner = _compose(base, lora, g, scaling, want_inner)
        ctx.save_for_backward(g, *([inner] if want_inner else []))
        ctx.scaling = scaling
        return delta

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # The backward of a compiled or watched region is the operator's.
        return _given(ctx, grad, _backward_operator if watched(grad) else _compose_backward)
