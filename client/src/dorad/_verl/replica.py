"""A replica: the server of one training worker, on the worker's GPU."""

from __future__ import annotations

from typing import Any, NoReturn

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_device_name, get_resource_name
from verl.workers.rollout.replica import RolloutReplica

from dorad._unsupported import UnsupportedError
from dorad._verl import settings
from dorad._verl.server import Server, actor_name


class Replica(RolloutReplica):  # type: ignore[misc]
    """Starts the server in an actor of the worker's node. verl's driver has one of each."""

    def __init__(
        self,
        replica_rank: int,
        config: Any,
        model_config: Any,
        gpus_per_node: int = 8,
        is_reward_model: bool = False,
        is_teacher_model: bool = False,
        name_suffix: str = "",
    ) -> None:
        found = settings.problems(omega_conf_to_dataclass(config), model_config)
        if is_reward_model or is_teacher_model:
            found.append("a reward model or a teacher needs another rollout: dorad serves policies")
        if found:
            raise UnsupportedError(found)
        super().__init__(replica_rank, config, model_config, gpus_per_node, name_suffix=name_suffix)

    async def init_standalone(self) -> None:
        self._refuse()

    async def init_colocated(self, resource_pool: Any) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UnsupportedError(
            ["servers apart from the training workers: verl sends them whole weights only"]
        )

    async def launch_servers(self) -> None:
        (worker,) = self.workers
        node_id, address, gpus = await worker.__ray_call__.remote(_place)
        gpu = gpus[0] if gpus else None
        actor: Any = ray.remote(Server)
        server = actor.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
            name=actor_name(self.replica_rank, self.name_suffix),
            max_concurrency=self.max_concurrency,
        ).remote(self.config, self.model_config, gpu, self.replica_rank)
        await server.launch_server.remote()
        self.servers = [server]
        self._server_handle = server
        # Its identity for verl's load balancer: it listens on the node's loopback only.
        port = (await server.target.remote()).rpartition(":")[2]
        self._server_address = f"{address}:{port}"


def _place(worker: Any) -> tuple[str, str, list[str]]:
    """Runs in the worker: its node, the node's address, its GPUs."""
    context = ray.get_runtime_context()
    ids = context.get_accelerator_ids().get(get_resource_name(), [])
    if get_device_name() == "cpu":  # Its places are numbered, too.
        ids = []
    return context.get_node_id(), ray.util.get_node_ip_address().strip("[]"), ids
