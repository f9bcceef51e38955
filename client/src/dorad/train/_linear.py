"""A linear and its DoRA adapter as one function.

PEFT adds DoRA's change to the base layer's output. Here the product with B adds the adapter to the
base product, and one kernel scales the sum; the backward has both terms of d_x in one tensor
(`_products`). That takes 6 passes over activations instead of 14, and on CUDA three calls instead
of some fifty operations of torch, which dominate small batches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from peft.tuners.lora import layer as lora
from torch import nn
from torch.autograd.function import once_differentiable

from dorad.train import _layers, _native, _products, _tiers
from dorad.train._dispatch import watched
from dorad.train._norm import accumulation_dtype


class Linear(lora.Linear):
    """Replaces PEFT's lora.Linear around patched DoRA layers.

    A plain linear with one DoRA adapter uses the function of this file, every other case PEFT's
    forward and the DoRA layers.
    """

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """See PEFT's lora.Linear."""
        # The cheapest test first: small layers must not pay for the others.
        if not (args or kwargs or is_small(self, x.numel()) or watched(x)):
            parts = whole(self)
            if isinstance(parts, Parts) and why_unfit(parts, x.device, x.dtype) is None:
                return _forward(parts, x)
        result: torch.Tensor = super().forward(x, *args, **kwargs)
        return result


def is_small(module: Linear, inputs: int) -> bool:
    """Whether it is too small for one function with so many elements of x."""
    weight: Any = module.get_base_layer().weight
    outputs = inputs // max(1, weight.shape[-1]) * weight.shape[0]
    return _tiers.is_small(weight.device, outputs, weight.numel())


class Parts(NamedTuple):
    """A linear with one DoRA adapter, without hooks on its inner calls."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    a: torch.Tensor
    b: torch.Tensor
    dora: _layers.FactoredLinear
    scaling: float
    adapter: str


def whole(module: Linear) -> Parts | str:
    """The parts of a module that may be one function in its current state, or why it may not."""
    active = module.active_adapters
    if module.disable_adapters or module.merged:
        return "its adapters are disabled or merged"
    if len(active) != 1:
        return "not just one adapter is active"
    adapter: str = active[0]
    if adapter not in module.lora_A or adapter not in module.lora_magnitude_vector:
        return "the active adapter is no DoRA adapter of it"
    base: Any = module.base_layer
    a, b = module.lora_A[adapter], module.lora_B[adapter]
    dora = module.lora_magnitude_vector[adapter]
    dropout: Any = module.lora_dropout[adapter]
    if type(dora) is not _layers.FactoredLinear:
        return "its DoRA layer is not patched"
    if not (type(base) is type(a) is type(b) is nn.Linear) or dora.fan_in_fan_out:
        return "its base layer, A or B is no nn.Linear"
    if any(_is_hooked(part) for part in (base, a, b, dora)):
        return "there are hooks inside of it"
    if nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
        return "there are hooks on all modules"
    if not isinstance(dropout, nn.Identity) and module.training:
        return "it has dropout"
    weight, bias = base.weight, base.bias
    if a.bias is not None or b.bias is not None:
        return "A or B has a bias"
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        return "its base layer is trained"
    if watched(weight, a.weight, b.weight, dora.weight):
        return "torch must see its operators"
    return Parts(weight, bias, a.weight, b.weight, dora, module.scaling[adapter], adapter)


def _is_hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__  # as of accelerate
    )


def why_unfit(parts: Parts, device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why the parts are no one function of an x on `device` in `dtype`, if any."""
    weight, a, b, magnitude = parts.weight, parts.a, parts.b, parts.dora.weight
    if not device == weight.device == a.device == b.device == magnitude.device:
        return "it is on several devices"
    if torch.is_autocast_enabled(device.type):
        if weight.dtype != torch.get_autocast_dtype(device.type):
            return "its weight is not in autocast's dtype"
        # Autocast casts everything but fp64.
        if torch.float64 in (dtype, a.dtype, b.dtype, magnitude.dtype):
            return "it has a part in fp64 under autocast"
    elif not dtype == weight.dtype == a.dtype:
        return "input, weight and adapter differ in dtype"
    if a.dtype != b.dtype:
        return "A and B differ in dtype"
    if device.type == "cuda" and a.shape[0] > _native.MOST_RANK:
        return "its rank is too large"
    if accumulation_dtype(dtype, magnitude.dtype) != accumulation_dtype(dtype):
        return "its magnitude is in fp64"
    return _tiers.why_eager(device, weight.dtype)


def _forward(parts: Parts, x: torch.Tensor) -> torch.Tensor:
    magnitude = parts.dora.weight
    if torch.is_grad_enabled() and (
        x.requires_grad or parts.a.requires_grad or parts.b.requires_grad or magnitude.requires_grad
    ):
        recorded: torch.Tensor = _DoraLinear.apply(  # type: ignore[no-untyped-call]
            x, parts.a, parts.b, magnitude, parts
        )
        return recorded
    y, _, _ = _run(parts, x, keep_inner=False)
    return y


def _run(
    parts: Parts, x: torch.Tensor, *, keep_inner: bool
) -> tuple[torch.Tensor, torch.Tensor, _products.Forward]:
    """y [..., out], x as [rows, in] of y's dtype, and the products' other results."""
    weight, bias, a, b, dora, scaling, adapter = parts
    magnitude = dora.weight.detach().flatten()
    a, b = a.detach(), b.detach()
    caching = dora.kept_norms() is not None
    make_scale = None
    if caching or not _products.makes_norm(weight, a, b, magnitude, scaling):

        def make_scale() -> tuple[torch.Tensor, torch.Tensor]:
            return dora.detached_scale(weight, a, b, scaling, adapter)

    rows = x.reshape(-1, x.shape[-1]).to(weight.dtype).contiguous()
    # In its final shape: a view that a function returns may not be changed in place.
    y = rows.new_empty(*x.shape[:-1], weight.shape[0])
    forward = _products.forward(
        rows,
        weight,
        bias,
        a,
        b,
        magnitude,
        scaling,
        make_scale,
        y.view(rows.shape[0], weight.shape[0]),
        keep_inner=keep_inner,
    )
    return y, rows, forward


class _DoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        magnitude: torch.Tensor,
        parts: Parts,
    ) -> torch.Tensor:
        _, for_a, for_b, for_magnitude, _ = ctx.needs_input_grad
        y, rows, (h, inner, scales) = _run(parts, x, keep_inner=for_magnitude)
        ctx.save_for_backward(
            a,
            b,
            parts.weight,
            scales,
            rows if for_a else None,
            h if for_b else None,
            inner if for_magnitude else None,
        )
        ctx.scaling = parts.scaling
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        ctx.magnitude_shape, ctx.magnitude_dtype = magnitude.shape, magnitude.dtype
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if not torch.is_grad_enabled() and not torch.is_autocast_enabled(grad.device.type):
            return _gradients(ctx, grad)
        # Autocast would cast fp32 tensors.
        with torch.autocast(grad.device.type, enabled=False):
            gradients: tuple[torch.Tensor | None, ...] = _last_gradients(ctx, grad)
            return gradients


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The requested gradients of x, a, b and the magnitude; the parts have none."""
    a, b, weight, scales, rows, h, inner = ctx.saved_tensors
    d_x, d_a, d_b, d_magnitude = _products.backward(
        grad.reshape(-1, grad.shape[-1]),
        rows,
        weight,
        a,
        b,
        scales,
        h,
        inner,
        ctx.scaling,
        ctx.magnitude_dtype,
        _products.Wanted(*ctx.needs_input_grad[:4]),
    )
    if d_x is not None:
        d_x = d_x.view(ctx.x_shape).to(ctx.x_dtype)
    if d_magnitude is not None:
        d_magnitude = d_magnitude.view(ctx.magnitude_shape)
    return d_x, d_a, d_b, d_magnitude, None


# The saved tensors have no graph: no second derivative.
_last_gradients = once_differentiable(_gradients)
