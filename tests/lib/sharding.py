"""Ways to shard a model over the processes of a group (gloo), and the group."""

import datetime
import importlib.util
import os
from collections.abc import Callable
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from peft.utils.other import fsdp_auto_wrap_policy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

WORLD = 2
IMPORTS = ["torch.distributed.fsdp", "peft", "transformers.models.llama.modeling_llama", "dorad"]
DEEPSPEED = importlib.util.find_spec("deepspeed") is not None


def run(target: Callable, *arguments: object) -> None:
    """target(rank, *arguments) in each process of a group. All must end with exit code 0.

    They are forks of a process that has imported what they need. Not of this one: it may have
    threads of gRPC and torch, whose locks a fork would inherit.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(IMPORTS)
    ranks = [
        context.Process(target=target, args=(rank, *arguments), daemon=True)
        for rank in range(WORLD)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(240)
        if rank.is_alive():
            rank.kill()
            rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * WORLD


@contextmanager
def group(rank: int, init_method: str):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=init_method,
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=180),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def zero3(model, batch: int = 1, learning_rate: float = 0.1):
    """DeepSpeed's engine, with SGD. No parameter is too small to be in shards."""
    rank = str(dist.get_rank())
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": rank, "RANK": rank}
    os.environ |= {"WORLD_SIZE": str(WORLD), "LOCAL_SIZE": str(WORLD)}
    import deepspeed
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    # It would compile a library; gloo does without.
    deepspeed.ops.__compatible_ops__[ShareMemCommBuilder.NAME] = False
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(trained, lr=learning_rate),
        config={
            "train_micro_batch_size_per_gpu": batch,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        },
    )
    assert all(parameter.numel() == 0 for parameter in model.parameters())
    return engine


def fsdp1(model, policy, **options):
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **options
    )


def fsdp1_by_layer(model):
    return fsdp1(model, ModuleWrapPolicy({LlamaDecoderLayer}), use_orig_params=True)


def fsdp1_by_leaf(model):
    """As PEFT's wrapping policy for FSDP: trained leaves alone, in flat parameters of their own."""
    return fsdp1(model, fsdp_auto_wrap_policy(model))


def fsdp2(model):
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def ways():
    """Of sharding one of transformers' Llama models with an adapter; DeepSpeed's if installed."""
    return [fsdp1_by_layer, fsdp1_by_leaf, fsdp2, *([zero3] if DEEPSPEED else [])]


def replicated(model):
    return DistributedDataParallel(model)
