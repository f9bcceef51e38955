"""Patched models in two processes (gloo): DDP and FSDP2 give the gradients of one process."""

import datetime
import sys

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from dorad.train import patch, tier
from lib.dora_training import Linears, adapted, assert_close, distance, step
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

WORLD = 2


def build(train_base=False):
    torch.manual_seed(0)
    model = adapted(Linears())
    for name, parameter in model.named_parameters():
        if "base_layer.weight" in name:
            parameter.requires_grad_(train_base)
    patch(model)
    return model


def batch(rank):
    made = torch.Generator().manual_seed(100 + rank)
    return torch.randn(6, 5, 24, generator=made)


def reference(train_base=False):
    """The mean of both ranks' results on one process."""
    model = build(train_base)
    results = [step(model, batch(rank)) for rank in range(WORLD)]
    mean = {k: (g + results[1].gradients[k]) / WORLD for k, g in results[0].gradients.items()}
    return results, mean


def check(result, rank, tolerance=1e-5, train_base=False):
    results, mean = reference(train_base)
    assert_close(result, type(result)(results[rank].output, mean), tolerance)


def ddp(rank):
    result = step(DistributedDataParallel(build()), batch(rank))
    result.gradients = {k.removeprefix("module."): g for k, g in result.gradients.items()}
    check(result, rank)


def whole(result):
    result.gradients = {k: g.full_tensor() for k, g in result.gradients.items()}
    return result


def fsdp2(rank, *, leaves=False, reshard=True, train_base=False):
    mesh = init_device_mesh("cpu", (WORLD,))
    model = build(train_base)
    root = model.base_model.model
    for layer in (root.up, root.middle, root.down):
        if leaves:  # as PEFT's wrapping policy does it: A and B are in shards when norms are taken
            for part in (layer.base_layer, layer.lora_A["default"], layer.lora_B["default"]):
                fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    first = whole(step(model, batch(rank)))
    optimizer.step()
    # Before another model is patched, which clears the cache: moved weights must be seen anyway.
    got = model(batch(rank)).detach()
    check(first, rank, train_base=train_base)
    single = build(train_base)
    _, mean = reference(train_base)
    with torch.no_grad():
        for name, parameter in single.named_parameters():
            if name in mean:
                parameter.sub_(0.1 * mean[name])
    wanted = single(batch(rank)).detach()
    assert distance(wanted, build()(batch(rank)).detach()) > 1e-3
    assert distance(got, wanted) < 1e-5


def fsdp2_bf16(rank):
    mesh = init_device_mesh("cpu", (WORLD,))
    model = build()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    check(whole(step(model, batch(rank))), rank, 0.1)


CASES = {
    "ddp": ddp,
    "fsdp2 by layer": fsdp2,
    "fsdp2 by layer, kept whole": lambda rank: fsdp2(rank, reshard=False),
    "fsdp2 by leaf": lambda rank: fsdp2(rank, leaves=True),
    "fsdp2, base trained": lambda rank: fsdp2(rank, train_base=True),
    "fsdp2, base trained, kept whole": lambda rank: fsdp2(rank, train_base=True, reshard=False),
    "fsdp2 in bf16": fsdp2_bf16,
}


def run_all(rank, file, paths, failures):
    """A process of the group: all cases, so that it starts only once."""
    sys.path[:0] = paths
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{file}",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=60),
    )
    with tier("fused"):
        for name, case in CASES.items():
            try:
                case(rank)
            except BaseException as error:
                failures.put((name, rank, f"{type(error).__name__}: {error}"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    # Not fork: this process may have threads of gRPC and torch, whose locks a child would inherit.
    context = mp.get_context("spawn")
    queue = context.Queue()
    file = tmp_path_factory.mktemp("group") / "store"
    workers = [
        context.Process(target=run_all, args=(rank, file, sys.path[:], queue), daemon=True)
        for rank in range(WORLD)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        if worker.is_alive():
            worker.kill()
    assert [worker.exitcode for worker in workers] == [0] * WORLD
    found = []
    while not queue.empty():
        found.append(queue.get())
    return found


@pytest.mark.parametrize("case", CASES)
def test_two_processes(case, failures):
    assert [failure for failure in failures if failure[0] == case] == []
