"""PEFT's DoRA variants with merging and unmerging that agree with our forward.

PEFT divides 0 by 0 in rows of zeros, and with adapters in half precision it rounds B·A, the norm
and W + s·B·A before it scales: a g near 1 would have no effect. Here a merged weight is rounded
once, and rows of zeros stay so.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import layer as lora
from peft.tuners.lora import variants

from dorad.train._norm import accumulation_dtype, epsilon


class _Merging:
    """A mixin of PEFT's variants, whose methods are static."""

    @staticmethod
    def merge_safe(module: Any, active_adapter: str, orig_weight: torch.Tensor) -> torch.Tensor:
        return _merged(module, active_adapter, safe=True)

    @staticmethod
    def merge_unsafe(module: Any, active_adapter: str, orig_weight: torch.Tensor) -> None:
        orig_weight.data = _merged(module, active_adapter, safe=False)

    @staticmethod
    def unmerge(module: Any, active_adapter: str, orig_weight: torch.Tensor) -> torch.Tensor:
        norm = module._cache_pop(_key(active_adapter))
        g = _scale(module, active_adapter, norm, orig_weight.dtype)
        with torch.no_grad():
            # A row of zeros was one before: its g may be 0. Other rows with 0 are lost.
            sums = torch.where(norm < epsilon(orig_weight.dtype), 0, orig_weight.data / g)
            return (sums - _delta(module, active_adapter)).to(orig_weight.dtype)


def _merged(module: Any, adapter: str, *, safe: bool) -> torch.Tensor:
    """g·(W + s·B·A), in W's dtype. W may hold other adapters; the norm is the base's."""
    with torch.no_grad():
        delta = _delta(module, adapter)
        with module._unmerged_base_weight(safe_merge=safe) as base:
            dims = [dim for dim in range(base.dim()) if dim != _output_dim(module)]
            norm = torch.linalg.vector_norm(base + delta, dim=dims, keepdim=True)
        module._cache_store(_key(adapter), norm)
        weight: torch.Tensor = (
            module.get_base_layer().weight.data
        )  # The block above has written it.
        return ((weight + delta) * _scale(module, adapter, norm, weight.dtype)).to(weight.dtype)


def _key(adapter: str) -> str:
    return f"{adapter}-weight_norm"  # PEFT's


def _scale(module: Any, adapter: str, norm: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    magnitude: torch.Tensor = module.lora_magnitude_vector[adapter].weight.detach()
    return magnitude.view(norm.shape) / norm.clamp_min(epsilon(dtype))


def _output_dim(module: Any) -> int:
    return int(isinstance(module, lora.Embedding) or getattr(module, "fan_in_fan_out", False))


def _delta(module: Any, adapter: str) -> torch.Tensor:
    """s·B·A in the shape of the weight, not rounded to the adapter's dtype."""
    weight: torch.Tensor = module.get_base_layer().weight
    a: torch.Tensor
    b: torch.Tensor
    if isinstance(module, lora.Embedding):
        a, b = module.lora_embedding_A[adapter], module.lora_embedding_B[adapter]
    else:  # Of a convolution without groups: PEFT merges no others.
        a, b = module.lora_A[adapter].weight, module.lora_B[adapter].weight
    dtype = accumulation_dtype(weight.dtype, a.dtype, b.dtype)
    with torch.autocast(weight.device.type, enabled=False):
        delta = b.detach().to(dtype).flatten(1) @ a.detach().to(dtype).flatten(1)
    delta *= module.scaling[adapter]
    return delta.T if _output_dim(module) else delta.view(weight.shape)


class MergingLinear(_Merging, variants.DoraLinearVariant):
    """The variant of lora.Linear."""


class MergingEmbedding(_Merging, variants.DoraEmbeddingVariant):
    """The variant of lora.Embedding."""


class MergingConv1d(_Merging, variants.DoraConv1dVariant):
    """The variant of lora.Conv1d."""


class MergingConv2d(_Merging, variants.DoraConv2dVariant):
    """The variant of lora.Conv2d."""


class MergingConv3d(_Merging, variants.DoraConv3dVariant):
    """The variant of lora.Conv3d."""


VARIANTS: dict[type, type] = {
    variants.DoraLinearVariant: MergingLinear,
    variants.DoraEmbeddingVariant: MergingEmbedding,
    variants.DoraConv1dVariant: MergingConv1d,
    variants.DoraConv2dVariant: MergingConv2d,
    variants.DoraConv3dVariant: MergingConv3d,
}
"""PEFT's classes and their replacements."""
