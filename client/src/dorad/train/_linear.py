"""Linears and their DoRA adapters as one function.

PEFT adds DoRA's change to the base layer's output. Here the product with B adds the adapter to the
base product, and one kernel scales the sum; the backward has all terms of d_x in one tensor
(`_products`). That takes 6 passes over activations instead of 14, and on CUDA one call each way
instead of some fifty operations of torch, which dominate small batches. Linears that have the same
input are one call together (`_sharing`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import layer as lora
from torch import nn
from torch.autograd.function import once_differentiable

from dorad.train import _layers, _native, _norms, _products, _sharing, _steps, _tiers
from dorad.train._dispatch import plain, watched
from dorad.train._norm import accumulation_dtype


class Linear(lora.Linear):
    """Replaces PEFT's lora.Linear around patched DoRA layers.

    A plain linear with one DoRA adapter uses the function of this file, every other case PEFT's
    forward and the DoRA layers.
    """

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """See PEFT's lora.Linear."""
        if not (args or kwargs or torch.compiler.is_compiling()):
            given = _sharing.take(self, x, _state_of)
            if given is not None:
                return given
            # The cheapest test first: small layers must not pay for the others.
            if not (_is_small(self, x) or watched(x)):
                parts = _fit(self, x)
                if parts is not None:
                    return _forward(self, parts, x)
        result: torch.Tensor = super().forward(x, *args, **kwargs)
        return result


def is_small(module: Linear, inputs: int) -> bool:
    """Whether it is too small for one function with so many elements of x."""
    weight = _parameter(module._modules["base_layer"], "weight")
    outputs = inputs // max(1, weight.shape[-1]) * weight.shape[0]
    return _tiers.is_small(weight.device, outputs, weight.numel())


def _is_small(module: Linear, x: torch.Tensor) -> bool:
    return not x.is_cuda and is_small(module, x.numel())


def _state_of(module: Linear) -> tuple[object, ...]:
    """What may change between two calls of a forward."""
    return module.disable_adapters, module.merged, *module.active_adapters


def _parameter(module: Any, name: str) -> torch.Tensor:
    # nn.Module's own search takes longer; FSDP1 has its views elsewhere.
    own: dict[str, Any] = module._parameters
    found: torch.Tensor = own[name] if name in own else getattr(module, name)
    return found


class Parts(NamedTuple):
    """A linear with one DoRA adapter, without hooks on its inner calls."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    a: torch.Tensor
    b: torch.Tensor
    magnitude: torch.Tensor
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
    modules: dict[str, Any] = module._modules
    factors, doras = modules["lora_A"]._modules, modules["lora_magnitude_vector"]._modules
    if adapter not in factors or adapter not in doras:
        return "the active adapter is no DoRA adapter of it"
    base = modules["base_layer"]
    a, b = factors[adapter], modules["lora_B"]._modules[adapter]
    dora, dropout = doras[adapter], modules["lora_dropout"]._modules[adapter]
    if type(dora) is not _layers.FactoredLinear:
        return "its DoRA layer is not patched"
    if not (type(base) is type(a) is type(b) is nn.Linear) or dora.fan_in_fan_out:
        return "its base layer, A or B is no nn.Linear"
    if _are_hooked(base, a, b, dora):
        return "there are hooks inside of it"
    if nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
        return "there are hooks on all modules"
    if module.training and not isinstance(dropout, nn.Identity):
        return "it has dropout"
    weight, bias = _parameter(base, "weight"), _parameter(base, "bias")
    if _parameter(a, "bias") is not None or _parameter(b, "bias") is not None:
        return "A or B has a bias"
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        return "its base layer is trained"
    rest = _parameter(a, "weight"), _parameter(b, "weight"), _parameter(dora, "weight")
    if not plain(weight, *rest):
        return "torch must see its operators"
    return Parts(weight, bias, *rest, dora, module.scaling[adapter], adapter)


def _are_hooked(*modules: nn.Module) -> bool:
    """Whether any of them is."""
    for module in modules:
        if (
            module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
            or "forward" in module.__dict__  # as of accelerate
        ):
            return True
    return False


def why_unfit(parts: Parts, device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why the parts are no one function of an x on `device` in `dtype`, if any."""
    weight, a, b, magnitude = parts.weight, parts.a, parts.b, parts.magnitude
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
    if magnitude.dtype == torch.float64 and dtype != torch.float64:
        return "its magnitude is in fp64"
    return _tiers.why_eager(device, weight.dtype)


def _fit(module: Linear, x: torch.Tensor) -> Parts | None:
    """The parts of a module that may be one function of x, if any."""
    parts = whole(module)
    if isinstance(parts, str) or why_unfit(parts, x.device, x.dtype) is not None:
        return None
    return parts


def _forward(module: Linear, parts: Parts, x: torch.Tensor) -> torch.Tensor:
    """The module's output; those that follow with x are computed, too."""
    group, followers = [parts], []
    if not _are_hooked(module):  # Hooks may need the modules' calls in turn, as FSDP2's do.
        followers = _sharing.begin(module, x, _steps.last(parts.b))
        group = _group(parts, followers, x)
    y, *others = _outputs(group, x)
    if others:
        _sharing.give(followers, others, _state_of)
    return y


def _group(first: Parts, followers: list[Linear], x: torch.Tensor) -> list[Parts]:
    """`first` and the parts of the followers, or `first` alone if one of them does not fit."""
    group, kind = [first], _kind(first)
    for module in followers:
        if _are_hooked(module) or _is_small(module, x):
            return [first]
        parts = whole(module)
        if isinstance(parts, str) or _kind(parts) != kind:
            return [first]
        group.append(parts)
    return group


def _kind(parts: Parts) -> tuple[object, ...]:
    """One call has one of it. What fits one linear fits others of its kind."""
    tensors = parts.weight, parts.a, parts.b, parts.magnitude
    is_large = parts.a.shape[0] > _native.MOST_RANK
    return (
        parts.weight.shape[1],
        is_large,
        *[(each.dtype, each.device) for each in tensors],
    )


def _outputs(group: list[Parts], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if torch.is_grad_enabled():
        tensors = [each for parts in group for each in (parts.a, parts.b, parts.magnitude)]
        if x.requires_grad or any(tensor.requires_grad for tensor in tensors):
            return _DoraLinears.apply(x, group, *tensors)
    ys, _, _, _ = _run(group, x, recorded=False, keep_inner=False)
    return tuple(ys)


def _run(
    group: list[Parts], x: torch.Tensor, *, recorded: bool, keep_inner: bool
) -> tuple[list[torch.Tensor], torch.Tensor, list[_products.Layer], _products.Forward]:
    """The y [..., out], x contiguous and of y's dtype, the layers, and the products' results."""
    layers = [
        _products.Layer(weight, bias, a.detach(), b.detach(), m.detach(), scaling)
        for weight, bias, a, b, m, _, scaling, _ in group
    ]
    key = _norms.key_of(group, x)
    scales = _norms.kept(group, key, recorded=recorded)
    known = scales is not None
    if scales is None and not all(map(_makes_norm, group, layers)):
        scales = _made_scales(group, layers)
    dtype = layers[0].weight.dtype
    x = (x if x.dtype == dtype else x.to(dtype)).contiguous()
    *shape, _ = x.shape
    # In their final shapes: a view that a function returns may not be changed in place.
    ys = [x.new_empty(*shape, layer.weight.shape[0]) for layer in layers]
    forward = _products.forward(x, layers, scales, ys, keep_inner=keep_inner)
    if not known:
        _norms.keep(group, key, forward.scales)
    return ys, x, layers, forward


def _makes_norm(parts: Parts, layer: _products.Layer) -> bool:
    return parts.dora.kept_norms() is None and _products.makes_norm(layer)


def _made_scales(group: list[Parts], layers: list[_products.Layer]) -> torch.Tensor:
    """The norms and g of layers for which the products' kernels do not make them."""
    starts = _products.places_of(layers, 0).columns
    dtype = accumulation_dtype(layers[0].weight.dtype, layers[0].a.dtype)
    scales = layers[0].weight.new_zeros(2, starts[-1], dtype=dtype)
    for parts, (weight, _, a, b, _, scaling), start in zip(group, layers, starts, strict=False):
        norm, g = parts.dora.detached_scale(weight, a, b, scaling, parts.adapter)
        scales[0, start : start + len(norm)] = norm
        scales[1, start : start + len(norm)] = g
    return scales


class _DoraLinears(torch.autograd.Function):
    """The outputs of linears that have one input."""

    @classmethod
    def apply(cls, *given: Any) -> tuple[torch.Tensor, ...]:
        """Without Function's own search for wrappers of torch.func: `watched` has seen to them."""
        its_own: Any = super(torch.autograd.Function, cls)
        outputs: tuple[torch.Tensor, ...] = its_own.apply(*given)
        return outputs

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: list[Parts], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        wanted, (for_a, for_b, for_magnitude) = _wanted(ctx.needs_input_grad[2:])
        ys, used, layers, (kept, scales) = _run(group, x, recorded=True, keep_inner=for_magnitude)
        ctx.save_for_backward(used if for_a else None, kept if for_b or for_magnitude else None)
        # Those are there anyway, and checkpointing has some calls of Python for a saved tensor.
        ctx.layers, ctx.versions, ctx.scales = layers, _versions(layers), scales
        ctx.wanted = wanted
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        ctx.set_materialize_grads(False)
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        device = ctx.layers[0].weight.device.type
        if not torch.is_grad_enabled() and not torch.is_autocast_enabled(device):
            return _gradients(ctx, *grads)
        # Autocast would cast fp32 tensors.
        with torch.autocast(device, enabled=False):
            gradients: tuple[torch.Tensor | None, ...] = _last_gradients(ctx, *grads)
            return gradients


@functools.lru_cache(maxsize=256)
def _wanted(
    needed: tuple[bool, ...],
) -> tuple[tuple[_products.Wanted, ...], _products.Wanted]:
    """The linears' wanted gradients, and those that any of them wants."""
    wanted = tuple(_products.Wanted(*needed[i : i + 3]) for i in range(0, len(needed), 3))
    return wanted, _products.Wanted(*map(any, zip(*wanted, strict=True)))


def _versions(layers: list[_products.Layer]) -> list[int]:
    """Rise with each write to a weight, A or B."""
    return [each._version for layer in layers for each in (layer.weight, layer.a, layer.b)]


def _gradients(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """The requested gradients of x, and of a, b and the magnitude of each linear."""
    x, kept = ctx.saved_tensors
    layers: list[_products.Layer] = ctx.layers
    if _versions(layers) != ctx.versions:
        raise RuntimeError(
            "a weight of a DoRA linear has been modified by an inplace operation since the forward"
            " whose gradients are computed"
        )
    given, wanted = _completed(ctx.x_shape, grads, layers, ctx.wanted)
    d_x, found = _products.backward(
        given,
        x,
        layers,
        _products.Forward(kept, ctx.scales),
        ctx.needs_input_grad[0],
        wanted,
    )
    if d_x is not None and d_x.dtype != ctx.x_dtype:
        d_x = d_x.to(ctx.x_dtype)
    return (d_x, None, *itertools.chain(*found))


def _completed(
    x_shape: torch.Size,
    grads: Sequence[torch.Tensor | None],
    layers: Sequence[_products.Layer],
    wanted: Sequence[_products.Wanted],
) -> tuple[list[torch.Tensor], list[_products.Wanted]]:
    """The gradients with zeros for those that are None: such an output has no part in any."""
    given, rest = [], list(wanted)
    for i, (layer, grad) in enumerate(zip(layers, grads, strict=True)):
        if grad is None:
            grad = layer.weight.new_zeros(*x_shape[:-1], layer.weight.shape[0])
            rest[i] = _products.Wanted(False, False, False)
        given.append(grad)
    return given, rest


# The saved tensors have no graph: no second derivative.
_last_gradients = once_differentiable(_gradients)
