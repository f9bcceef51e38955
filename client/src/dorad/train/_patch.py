"""Replaces PEFT's DoRA layers in an existing model by ours, and back."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import peft
import torch
from peft.tuners.lora import layer as lora
from torch.distributed.fsdp import FullyShardedDataParallel

from dorad.train import _layers, _linear, _quantised, _steps, _tiers

_logger = logging.getLogger("dorad.train")

_OURS = _layers.OURS
_THEIRS = {ours: theirs for theirs, ours in _OURS.items()}

# By exact type: subclasses (quantised and tensor-parallel layers, new variants) compute something
# else.
_KINDS = ("Linear", "Embedding", "Conv1d", "Conv2d", "Conv3d")
_MODULES = {f"{lora.__name__}.{kind}" for kind in _KINDS}
_VARIANTS = {f"peft.tuners.lora.variants.Dora{kind}Variant" for kind in _KINDS}
_WEIGHTS = {"Parameter", "Tensor", "DTensor"}
_DTYPES = {torch.float64, torch.float32, torch.bfloat16, torch.float16}

_OUR_VARIANTS: dict[type, type] = {}
if hasattr(lora.LoraLayer, "_unmerged_base_weight"):  # since PEFT 0.21; before it merges itself
    from dorad.train import _merge

    _OUR_VARIANTS = _merge.VARIANTS
_THEIR_VARIANTS = {ours: theirs for theirs, ours in _OUR_VARIANTS.items()}


class UnsupportedLayersError(ValueError):
    """The model has DoRA layers that cannot be patched: `layers` has their names and reasons."""

    def __init__(self, unsupported: dict[str, str]) -> None:
        lines = "".join(f"\n  {name}: {reason}" for name, reason in unsupported.items())
        super().__init__(f"cannot patch {len(unsupported)} DoRA layers:{lines}")
        self.layers = unsupported


@dataclasses.dataclass(frozen=True)
class Patched:
    """The result of `patch`. Layers are named by module and adapter: "model.q_proj[default]"."""

    layers: tuple[str, ...]
    """Layers that are ours now, patched by this call or before."""
    left: dict[str, str]
    """Layers that stay PEFT's, with reasons. Empty unless `strict` was false."""


@dataclasses.dataclass(frozen=True)
class _Layer:
    name: str
    module: Any  # PEFT's LoRA layer around the base layer
    adapter: str
    dora: Any  # the DoRA layer


def patch(model: torch.nn.Module, *, strict: bool = True) -> Patched:
    """Makes every DoRA layer of a PEFT model use our norms and our compose.

    The layers keep their parameters, names and results; `unpatch` undoes it. DoRA adapters that
    `add_adapter` or `load_adapter` add later are ours, too; layers of theirs that cannot be patched
    are named in the log. Calling it again is harmless. Not while another thread runs the model.

    Raises UnsupportedLayersError, which lists every layer that cannot be patched, and changes
    nothing; with `strict=False` those layers stay as they are, in `Patched.left` and in the log.
    Raises ValueError when the model has no DoRA layer, and says whether it is plain LoRA.
    """
    found = list(_dora_layers(model))
    if not found:
        why = (
            "its adapters are plain LoRA (use_dora=False), which needs no patch"
            if has_lora(model)
            else "it has no LoRA layers"
        )
        raise ValueError(f"{type(model).__name__} has no DoRA layers of PEFT: {why}")
    left = _left(found)
    if left and strict:
        raise UnsupportedLayersError(left)
    for module in model.modules():
        if type(module) is peft.LoraModel:
            module.__class__ = _LoraModel
    return _replace(found, left)


class _LoraModel(peft.LoraModel):
    """Replaces PEFT's around patched layers: an adapter's layers are made here."""

    def inject_adapter(
        self, model: torch.nn.Module, adapter_name: str, *args: Any, **kwargs: Any
    ) -> None:
        super().inject_adapter(model, adapter_name, *args, **kwargs)
        found = [layer for layer in _dora_layers(model) if layer.adapter == adapter_name]
        _replace(found, _left(found))


# Beside the DoRA layers.
_RESTORED: dict[type, type] = {_linear.Linear: lora.Linear, _LoraModel: peft.LoraModel}


def _left(layers: list[_Layer]) -> dict[str, str]:
    """The layers that cannot be patched, with reasons."""
    return {layer.name: reason for layer in layers if (reason := _unsupported(layer)) is not None}


def _replace(layers: list[_Layer], left: dict[str, str]) -> Patched:
    """Makes all but `left` ours, which are named in the log."""
    if left:
        _logger.warning("%s", UnsupportedLayersError(left))
    _steps.watch()
    done = [layer for layer in layers if layer.name not in left]
    for layer in done:
        layer.dora.__class__ = _OURS.get(type(layer.dora), type(layer.dora))
        if type(layer.module) is lora.Linear:
            layer.module.__class__ = _linear.Linear
        _replace_variant(layer, _OUR_VARIANTS)
    return Patched(tuple(layer.name for layer in done), left)


def unpatch(model: torch.nn.Module) -> tuple[str, ...]:
    """Makes every layer PEFT's own again. Returns the names of the layers that were ours."""
    names = tuple(layer.name for layer in _dora_layers(model) if type(layer.dora) in _THEIRS)
    _restore(model, [])
    return names


def get_peft_model(
    model: torch.nn.Module,
    config: peft.PeftConfig,
    *args: Any,
    strict: bool = True,
    **kwargs: Any,
) -> peft.PeftModel:
    """`peft.get_peft_model` with the same arguments, then `patch`, whose errors it raises."""
    adapted: peft.PeftModel = peft.get_peft_model(model, config, *args, **kwargs)
    patch(adapted, strict=strict)
    return adapted


@contextlib.contextmanager
def patched(model: torch.nn.Module, *, strict: bool = True) -> Iterator[Patched]:
    """Within the block the model is patched, as by `patch`; layers that were ours before stay so.

    Layers that are made in the block are PEFT's after it.
    """
    before = [module for module in model.modules() if type(module) in _THEIRS | _RESTORED]
    try:
        yield patch(model, strict=strict)
    finally:
        _restore(model, before)


def _restore(model: torch.nn.Module, but: list[torch.nn.Module]) -> None:
    """Gives PEFT's classes back, also to linears whose DoRA layers were deleted."""
    kept = {id(module) for module in but}
    for layer in _dora_layers(model):
        if type(layer.dora) in _THEIRS and id(layer.dora) not in kept:
            layer.dora.__class__ = _THEIRS[type(layer.dora)]
            _replace_variant(layer, _THEIR_VARIANTS)
    for module in model.modules():
        if id(module) not in kept:
            module.__class__ = _RESTORED.get(type(module), type(module))


def _replace_variant(layer: _Layer, classes: dict[type, type]) -> None:
    variant = _variant(layer)
    # bitsandbytes' weights merge as in PEFT.
    if type(variant) in classes and _full_name(layer.module) not in _quantised.LAYERS:
        variant.__class__ = classes[type(variant)]


def _variant(layer: _Layer) -> Any:
    return getattr(layer.module, "lora_variant", {}).get(layer.adapter)  # since PEFT 0.15


def explain(model: torch.nn.Module, rows: int) -> dict[str, _tiers.LayerTier]:
    """The tier of each DoRA layer for `rows` tokens, and why, in the present modes.

    These are grad and autocast mode. Tier None: the layer is PEFT's. Layers of embeddings and
    convolutions are always eager.
    """
    return {layer.name: _tier(layer, rows) for layer in _dora_layers(model)}


def _tier(layer: _Layer, rows: int) -> _tiers.LayerTier:
    if type(layer.dora) not in _THEIRS:
        return _tiers.LayerTier(None, _unsupported(layer) or "it is not patched")
    if not isinstance(layer.dora, _layers.FactoredLinear):
        kind = type(layer.module).__name__
        return _tiers.LayerTier(_tiers.Tier.EAGER, f"it is around a layer of the kind {kind}")
    weight: torch.Tensor = layer.module.get_base_layer().weight
    b: torch.Tensor = layer.module.lora_B[layer.adapter].weight
    dtype = torch.promote_types(weight.dtype, b.dtype)
    if torch.is_autocast_enabled(weight.device.type):
        dtype = torch.get_autocast_dtype(weight.device.type)
    training = torch.is_grad_enabled() and (b.requires_grad or layer.dora.weight.requires_grad)
    why = _why_not_whole(layer, weight, rows)
    if why is None:
        return _tiers.whole_tier(training)
    alone = _tiers.choose(rows, b.shape[0], device=weight.device, dtype=dtype, training=training)
    if alone.reason == why:
        return alone
    return alone._replace(reason=f"{alone.reason}; it is not one function: {why}")


def _why_not_whole(layer: _Layer, weight: torch.Tensor, rows: int) -> str | None:
    module = layer.module
    if not isinstance(module, _linear.Linear):
        return f"its LoRA layer is a {_full_name(module)}"
    if _linear.is_small(module, rows * weight.shape[-1]):
        return "it is small"
    parts = _linear.whole(module)
    if isinstance(parts, str):
        return parts
    if parts.dora is not layer.dora:
        return "another adapter is active"
    return _linear.why_unfit(parts, weight.device, weight.dtype)


def has_lora(model: torch.nn.Module) -> bool:
    """Whether it has layers of PEFT's LoRA, with or without DoRA."""
    return any(isinstance(module, lora.LoraLayer) for module in model.modules())


def _dora_layers(model: torch.nn.Module) -> Iterator[_Layer]:
    for name, module in model.named_modules():
        if isinstance(module, lora.LoraLayer):
            # ConvNd layers have no such dict before their first DoRA adapter.
            for adapter, layer in (module.lora_magnitude_vector or {}).items():
                whole = isinstance(layer, FullyShardedDataParallel)
                yield _Layer(
                    f"{name}[{adapter}]", module, adapter, layer.module if whole else layer
                )


def _unsupported(layer: _Layer) -> str | None:
    """The reason why the layer cannot be patched, if any."""
    kind = _full_name(layer.module)
    if type(layer.module) is not _linear.Linear and kind not in {*_MODULES, *_quantised.LAYERS}:
        return f"its LoRA layer is a {kind}"
    variant = _variant(layer)
    known = variant is None or type(variant) in _THEIR_VARIANTS
    if not known and _full_name(variant) not in _VARIANTS:
        return f"its variant is {_full_name(variant)}"
    if type(layer.dora) not in _OURS and type(layer.dora) not in _THEIRS:
        return f"its DoRA layer is a {_full_name(layer.dora)}"
    base = layer.module.get_base_layer()
    weight: Any = getattr(base, "weight", None)
    if _quantised.LAYERS.get(kind) == (_full_name(base), type(weight).__name__):
        return _quantised.unready(base)
    if hasattr(base, "W_q") or type(weight).__name__ not in _WEIGHTS:
        return f"its base layer, a {_full_name(base)}, is quantised: {type(weight).__name__}"
    if weight.dtype not in _DTYPES:
        return f"its base weight is {weight.dtype}"
    return None


def _full_name(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
