"""DoRA training with PEFT, with fast norms and a fused compose. See docs/guides/training.md.

`patch` makes an existing PEFT model use them and `unpatch` undoes it; `get_peft_model`, `patched`
and `PatchCallback` do it in one line. `adapter_tensors` makes whole tensors of a model in shards.
`base_weights` leases the base weights of a server on the same host, and `adopt_base` makes a model
use them. Needs the extra `train`.
"""

from dorad._adapter_tensors import adapter_tensors
from dorad.train._base_weights import BaseWeights, BaseWeightsError, adopt_base, base_weights
from dorad.train._callback import PatchCallback
from dorad.train._compose import compose
from dorad.train._norm import weight_norm
from dorad.train._patch import (
    Patched,
    UnsupportedLayersError,
    explain,
    get_peft_model,
    patch,
    patched,
    unpatch,
)
from dorad.train._tiers import LayerTier, Tier, tier

__all__ = [
    "BaseWeights",
    "BaseWeightsError",
    "LayerTier",
    "PatchCallback",
    "Patched",
    "Tier",
    "UnsupportedLayersError",
    "adapter_tensors",
    "adopt_base",
    "base_weights",
    "compose",
    "explain",
    "get_peft_model",
    "patch",
    "patched",
    "tier",
    "unpatch",
    "weight_norm",
]
