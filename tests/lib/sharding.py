"""Ways to shard a model over a group of processes, and the group: gloo on CPUs, NCCL on GPUs."""

import datetime
import importlib.util
import os
from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from peft.utils.other import fsdp_auto_wrap_policy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]
IMPORTS = ["torch.distributed.fsdp", "peft", "transformers.models.llama.modeling_llama", "dorad"]
DEEPSPEED = importlib.util.find_spec("deepspeed") is not None


def world(device: str) -> int:
    """The processes of a group: two, or one where there is one GPU only."""
    return 2 if device == "cpu" else min(2, torch.cuda.device_count())


def context(device: str):
    """Of the group's processes. On the CPU they are forks of a process that has imported what they
    need. Not of this one: it may have threads of gRPC and torch, whose locks a fork would inherit.
    CUDA does not survive a fork.
    """
    if device == "cuda":
        return mp.get_context("spawn")
    made = mp.get_context("forkserver")
    made.set_forkserver_preload(IMPORTS)
    return made


def run(device: str, target: Callable, *arguments: object) -> None:
    """target(rank, *arguments) in each process of a group. All must end with exit code 0."""
    ranks = [
        context(device).Process(target=target, args=(rank, *arguments), daemon=True)
        for rank in range(world(device))
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(240)
        if rank.is_alive():
            rank.kill()
            rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * len(ranks)


@contextmanager
def group(rank: int, device: str, init_method: str):
    """Each process has a GPU of its own."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=init_method,
        rank=rank,
        world_size=world(device),
        timeout=datetime.timedelta(seconds=180),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def here() -> torch.device:
    """The device of this process in its group."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def mesh():
    """Of the whole group."""
    return init_device_mesh(here().type, (dist.get_world_size(),))


def zero3(model, batch: int = 1, learning_rate: float = 0.1):
    """DeepSpeed's engine, with SGD. No parameter is too small to be in shards."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"DS_ACCELERATOR": here().type, "LOCAL_RANK": rank, "RANK": rank}
    os.environ |= {"WORLD_SIZE": world, "LOCAL_SIZE": world}
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
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=here(), **options)


def fsdp1_by_layer(model):
    return fsdp1(model, ModuleWrapPolicy({LlamaDecoderLayer}), use_orig_params=True)


def fsdp1_by_leaf(model):
    """As PEFT's wrapping policy for FSDP: trained leaves alone, in flat parameters of their own."""
    return fsdp1(model, fsdp_auto_wrap_policy(model))


def fsdp2(model):
    whole = mesh()
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=whole)
    return fully_shard(model, mesh=whole)


def ways():
    """Of sharding one of transformers' Llama models with an adapter; DeepSpeed's if installed."""
    return [fsdp1_by_layer, fsdp1_by_leaf, fsdp2, *([zero3] if DEEPSPEED else [])]


def replicated(model):
    return DistributedDataParallel(model)
