"""verl's rollouts from dorad servers, one on each GPU. See docs/guides/verl.md.

    actor_rollout_ref.model.external_lib=dorad.verl actor_rollout_ref.rollout.name=dorad

verl imports this module in every process that needs it; the import registers the rollout "dorad".
Needs the extra `verl`.
"""

from __future__ import annotations

from dorad._unsupported import UnsupportedError

try:
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry
except ModuleNotFoundError as error:
    if error.name != "verl":
        raise
    raise ImportError(
        "dorad.verl needs the package verl, which is not installed: pip install 'dorad[verl]'"
    ) from None


def _replica() -> type:
    from dorad._verl.replica import Replica

    return Replica


RolloutReplicaRegistry.register("dorad", _replica)
_ROLLOUT_REGISTRY["dorad", "async"] = "dorad._verl.rollout.Rollout"

__all__ = ["UnsupportedError"]
