"""PEFT's DoRA layers with our norms and our compose.

Each class replaces the PEFT class that it extends, in existing objects (`patch`): it has the same
parameters and the same results, and adds no state.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import dora
from torch.distributed.fsdp import FullyShardedDataParallel

from dorad.train import _tiers
from dorad.train._compose import compose, compose_eager
from dorad.train._norm import accumulation_dtype, epsilon, plain_norm, weight_norm
from dorad.train._quantised import QuantisedWeight, quantised

_NORM_KEY = "factored-norm"


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter that fully_shard may have left in shards."""
    gather = getattr(tensor, "full_tensor", None)  # of a DTensor
    return tensor if gather is None else gather()


def _applied(module: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of a lora_A or lora_B for x, and its weight, for its values only."""
    if not isinstance(module, FullyShardedDataParallel):
        return module(x), _whole(module.weight.detach())
    # FSDP1 has the weight during the module's own forward only.
    seen: list[torch.Tensor] = []

    def keep(inner: Any, *_: object) -> None:
        seen.append(inner.weight.detach().clone())

    hook = module.module.register_forward_hook(keep)
    try:
        return module(x), seen[0]
    finally:
        hook.remove()


class _Factored:
    """Common part of the layers. A mixin of PEFT's DoRA layers."""

    weight: torch.nn.Parameter  # the magnitude
    training: bool

    def _scale(
        self,
        matrix: torch.Tensor | QuantisedWeight,
        a: torch.Tensor,
        b: torch.Tensor,
        scaling: float,
        adapter_name: str,
        *,
        groups: int = 1,
    ) -> torch.Tensor:
        """g = m / max(‖matrix + scaling·b @ a‖, ε), [out], differentiable by m only."""
        norm = self._norm(matrix, a, b, scaling, adapter_name, groups)
        # The division widens the magnitude itself: a cast would be a kernel each way.
        return self.weight.flatten() / norm.clamp_min(epsilon(matrix.dtype))

    def _norm(
        self,
        matrix: torch.Tensor | QuantisedWeight,
        a: torch.Tensor,
        b: torch.Tensor,
        scaling: float,
        adapter_name: str,
        groups: int,
    ) -> torch.Tensor:
        key = f"{_NORM_KEY}-{adapter_name}"
        kept = self.kept_norms()
        if kept is not None and key in kept:
            return kept[key]
        if isinstance(matrix, QuantisedWeight):
            norm = matrix.norm(a, b, scaling)
        elif (
            scaling != 0
            and _tiers.is_small(matrix.device, 0, matrix.numel())
            and not torch.is_autocast_enabled(matrix.device.type)
        ):
            norm = plain_norm(matrix, a, b, scaling)
        elif groups == 1:
            norm = weight_norm(matrix, a, b, scaling)
        else:
            norm = _grouped_norm(matrix, a, b, scaling, groups)
        if kept is not None:
            kept[key] = norm
        return norm

    def kept_norms(self) -> dict[str, torch.Tensor] | None:
        """The cache of PEFT's DoraCaching for them (it also has the dense B·A, which is not built
        here).

        None: DoraCaching is off; drops its entries.
        """
        kept: dict[str, torch.Tensor] = getattr(self, "_dora_cache", {})  # since PEFT 0.19
        if getattr(dora, "ENABLE_DORA_CACHING", False) and not self.training:
            return kept
        kept.clear()
        return None


def _grouped_norm(
    matrix: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, groups: int
) -> torch.Tensor:
    """The norm of a grouped convolution, as in PEFT.

    There b @ a is [out / groups, groups·in], reshaped to the weight's [out, in]: row p·groups + q
    of the weight belongs to row p of b and the q-th block of a's columns.
    """
    blocks = a.reshape(len(a), groups, -1)
    norms = [weight_norm(matrix[q::groups], blocks[:, q], b, scaling) for q in range(groups)]
    return torch.stack(norms, dim=1).flatten()


class FactoredLinear(_Factored, dora.DoraLinearLayer):
    """A DoRA layer of lora.Linear."""

    def forward(
        self,
        x: torch.Tensor,
        *,
        lora_A: torch.nn.Module,
        lora_B: torch.nn.Module,
        scaling: float,
        base_layer: Any,
        base_result: torch.Tensor | None = None,
        adapter_name: str = "default",
    ) -> torch.Tensor:
        """DoRA's addition to the output of `base_layer`; see PEFT's DoraLinearLayer."""
        weight = quantised(base_layer) or self._matrix(base_layer)
        reduced, a = _applied(lora_A, x)
        lora, b = _applied(lora_B, reduced)
        g = self._scale(weight, a, b, scaling, adapter_name)
        if base_result is None:  # Dropout: x is not the base's input.
            base_result = _product(x, weight)
        elif base_layer.bias is not None:
            base_result = base_result - _whole(base_layer.bias)
        return compose(base_result, lora, _like(g, base_result, lora), scaling)

    def _matrix(self, base_layer: Any) -> torch.Tensor:
        weight = _whole(base_layer.weight)
        return weight.T if self.fan_in_fan_out else weight

    def detached_scale(
        self,
        weight: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        scaling: float,
        adapter_name: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm, g), [out] in fp32, or fp64 with fp64 weights: g = m / max(norm, ε)."""
        with torch.no_grad():
            norm = self._norm(weight, a, b, scaling, adapter_name, 1)
            return norm, self.weight.flatten() / norm.clamp_min(epsilon(weight.dtype))


def _product(x: torch.Tensor, weight: torch.Tensor | QuantisedWeight) -> torch.Tensor:
    if isinstance(weight, QuantisedWeight):
        return weight.product(x)
    return F.linear(x, weight.to(x.dtype))


def _like(g: torch.Tensor, base: torch.Tensor, lora: torch.Tensor) -> torch.Tensor:
    """g in the dtype for the compose of base and lora."""
    return g.to(accumulation_dtype(base.dtype, lora.dtype))


class FactoredEmbedding(_Factored, dora.DoraEmbeddingLayer):
    """A DoRA layer of lora.Embedding: its norms run over the vocabulary."""

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        *,
        lora_A: torch.Tensor,
        lora_B: torch.Tensor,
        scaling: float,
        base_layer: Any,
        embed_fn: Any,
        adapter_name: str = "default",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(g, g·s·lora); see PEFT's DoraEmbeddingLayer."""
        weight = _whole(base_layer.weight)
        g = self._scale(
            weight.T,
            lora_A.T,
            lora_B.T,
            scaling,
            adapter_name,
        )
        return g, g * (embed_fn(x, lora_A) @ lora_B) * scaling


class _FactoredConv(_Factored):
    conv_fn: Any

    def forward(
        self,
        x: torch.Tensor,
        *,
        lora_A: torch.nn.Module,
        lora_B: torch.nn.Module,
        scaling: float,
        base_layer: Any,
        base_result: torch.Tensor | None = None,
        adapter_name: str = "default",
    ) -> torch.Tensor:
        """DoRA's addition to the output of `base_layer`; see PEFT's _DoraConvNdLayer."""
        weight = _whole(base_layer.weight)
        reduced, a = _applied(lora_A, x)
        lora, b = _applied(lora_B, reduced)
        g = self._scale(
            weight.flatten(1),
            a.flatten(1),
            b.reshape(-1, a.shape[0]),
            scaling,
            adapter_name,
            groups=base_layer.groups,
        )
        channels = (-1,) + (1,) * (weight.dim() - 2)  # Not of lora: a batch may be absent.
        if base_result is None:  # Dropout: x is not the base's input.
            base_result = self.conv_fn(
                x,
                weight,
                bias=None,
                stride=base_layer.stride,
                padding=base_layer.padding,
                dilation=base_layer.dilation,
                groups=base_layer.groups,
            )
        elif base_layer.bias is not None:
            base_result = base_result - _whole(base_layer.bias).view(channels)
        g = _like(g, base_result, lora)
        # g runs over the channels; the fused tiers support only the last dimension.
        return compose_eager(base_result, lora, g.view(channels), scaling)


class FactoredConv2d(_FactoredConv, dora.DoraConv2dLayer):
    """A DoRA layer of lora.Conv2d."""


class FactoredConv3d(_FactoredConv, dora.DoraConv3dLayer):
    """A DoRA layer of lora.Conv3d."""


OURS: dict[type, type] = {
    dora.DoraLinearLayer: FactoredLinear,
    dora.DoraEmbeddingLayer: FactoredEmbedding,
    dora.DoraConv2dLayer: FactoredConv2d,
    dora.DoraConv3dLayer: FactoredConv3d,
}
"""PEFT's classes and their replacements."""

if hasattr(dora, "DoraConv1dLayer"):  # since PEFT 0.16

    class FactoredConv1d(_FactoredConv, dora.DoraConv1dLayer):
        """A DoRA layer of lora.Conv1d."""

    OURS[dora.DoraConv1dLayer] = FactoredConv1d
