"""The training worker's side: publishes the adapter, and asks for memory."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout

from dorad import AdapterVersion, Client, SharedTensors
from dorad._unsupported import UnsupportedError
from dorad._verl import settings
from dorad._verl.server import actor_name
from dorad.train import base_weights

_NAME = "policy"  # The server is this replica's alone.
_SHOWN = 3
_PARTS = re.compile(r"^((language_)?model\.)+")


class Rollout(BaseRollout):  # type: ignore[misc]
    """Of one training worker, whose replica has its rank. verl calls it from one thread.

    With several workers each publishes to the server of its own GPU.
    """

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        found = settings.problems(self.config, self.model_config)
        if found:
            raise UnsupportedError(found)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self._server: Any = None

    async def _connect(self) -> None:
        """To the server, which verl starts after this object."""
        if self._server is None:
            self._server = ray.get_actor(actor_name(self.replica_rank))
            self._client = Client(await self._server.target.remote())
            self._memory = SharedTensors(self._client.info().shared_memory_socket)

    # --- verl's calls -----------------------------------------------------------------------------

    async def resume(self, tags: list[str]) -> None:
        await self._connect()
        await self._server.wake_up.remote(tags)

    async def release(self) -> None:
        await self._connect()
        await self._server.sleep.remote()

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        *,
        global_steps: int | None = None,
        peft_config: Any = None,
        base_sync_done: bool = True,
        **others: Any,
    ) -> None:
        """Publishes the adapter. Base weights are compared with the server's, which has its own.

        Raises:
          UnsupportedError: these are other base weights than the server's, or merged weights.
          InvalidArgument: the server refuses the adapter.
        """
        if wire_format != "named_tensors" or peft_config is None:
            raise UnsupportedError(
                ["verl sends weights without an adapter's configuration: merged, or as differences"]
            )
        await self._connect()
        if not base_sync_done:
            self._check_base(weights)
            return
        version = self._publish(dict(weights), peft_config)
        await self._server.set_policy.remote(version, global_steps)

    def _publish(self, tensors: dict[str, torch.Tensor], config: Any) -> AdapterVersion:
        return self._client.publish_from_memory(
            _NAME,
            shared_memory=self._memory,
            tensors=tensors,
            config=config,
            keep_last=0,
            pinned=True,
            timeout=math.inf,
        )

    def _check_base(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Reads all of `weights`, also after a difference: the workers make them together."""
        served = {_plain(name): tensor for name, tensor in base_weights(self._client).items()}
        tied = getattr(self.model_config.hf_config, "tie_word_embeddings", False)
        missing, problems = set(served), []
        for given, tensor in weights:
            shown = given.replace(".base_layer.", ".")
            name = _plain(shown)
            if name == "lm_head.weight" and name not in served and tied:
                name = "embed_tokens.weight"
            missing.discard(name)
            ours = served.get(name)
            if ours is None:
                problems.append(f"{shown}: the server's base model has none")
            elif not _equal(ours, tensor):
                problems.append(f"{shown}: differs from the server's base model")
        problems += [f"{name}: the trainer's base model has none" for name in sorted(missing)]
        if problems:
            rest = len(problems) - _SHOWN
            raise UnsupportedError(
                problems[:_SHOWN] + ([f"{rest} further differences"] if rest > 0 else [])
            )


def _plain(name: str) -> str:
    """Without the parts of a model that files and memory name differently."""
    return _PARTS.sub("", name)


def _equal(served: torch.Tensor, trained: torch.Tensor) -> bool:
    """In the trainer's dtype, to which it has converted the same files."""
    return torch.equal(served.to("cpu").to(trained.dtype), trained.detach().to("cpu"))
