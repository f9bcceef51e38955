"""Patched models in two processes have the gradients of PEFT's in one: DDP, FSDP, ZeRO-3.

With gloo on the CPU, and with NCCL on two GPUs, or on one in one process.
"""

import functools
import sys

import pytest
import torch
import torch.distributed as dist
from dorad.train import _native, adapter_tensors, patch, tier
from lib import sharding
from lib.dora_training import Linears, Result, adapted, assert_close, distance, step
from peft import get_peft_model_state_dict
from peft.utils.other import fsdp_auto_wrap_policy
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

RATE = 0.1


def build(train_base=False):
    torch.manual_seed(0)
    model = adapted(Linears())
    for name, parameter in model.named_parameters():
        if "base_layer.weight" in name:
            parameter.requires_grad_(train_base)
    return model.to(sharding.here())


def ours(train_base=False):
    model = build(train_base)
    patch(model)
    return model


def batch(rank):
    made = torch.Generator().manual_seed(100 + rank)
    return torch.randn(6, 5, 24, generator=made).to(sharding.here())


def reference(train_base=False):
    """The results of all ranks and their mean, by PEFT in one process."""
    model = build(train_base)
    results = [step(model, batch(rank)) for rank in range(dist.get_world_size())]
    mean = {k: sum(r.gradients[k] for r in results) / len(results) for k in results[0].gradients}
    return results, mean


def check(result, rank, tolerance=1e-5, train_base=False):
    results, mean = reference(train_base)
    assert_close(result, type(result)(results[rank].output, mean), tolerance)


def ddp(rank):
    model = DistributedDataParallel(ours())
    check_gathered(model)
    result = step(model, batch(rank))
    result.gradients = {k.removeprefix("module."): g for k, g in result.gradients.items()}
    check(result, rank)


def check_gathered(model):
    """What would be published, before the first step."""
    tensors = adapter_tensors(model, keep=dist.get_rank() == 0)
    if dist.get_rank() == 0:
        torch.testing.assert_close(
            {name: tensor.cpu() for name, tensor in tensors.items()},
            {name: tensor.cpu() for name, tensor in get_peft_model_state_dict(build()).items()},
            rtol=0,
            atol=0,
        )
    else:
        assert tensors == {}


def whole(result):
    result.gradients = {k: g.full_tensor() for k, g in result.gradients.items()}
    return result


def fsdp2(rank, *, leaves=False, reshard=True, train_base=False):
    mesh = sharding.mesh()
    model = ours(train_base)
    root = model.base_model.model
    for layer in (root.up, root.middle, root.down):
        if leaves:  # as PEFT's wrapping policy does it: A and B are in shards when norms are taken
            for part in (layer.base_layer, layer.lora_A["default"], layer.lora_B["default"]):
                fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    check_gathered(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=RATE)
    first = whole(step(model, batch(rank)))
    optimizer.step()
    # Before another model is patched, which clears the cache: moved weights must be seen anyway.
    got = model(batch(rank)).detach()
    check(first, rank, train_base=train_base)
    assert distance(got, after_a_step(rank, train_base)) < 1e-5


def after_a_step(rank, train_base=False):
    """The output of one process after a step of SGD."""
    single = build(train_base)
    results, mean = reference(train_base)
    with torch.no_grad():
        for name in mean:
            single.get_parameter(name).sub_(RATE * mean[name])
        output = single(batch(rank))
    assert distance(output, results[rank].output) > 1e-3
    return output


def fsdp2_bf16(rank):
    model = ours()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    fully_shard(model, mesh=sharding.mesh(), mp_policy=policy)
    check(whole(step(model, batch(rank))), rank, 0.1)


def checkpointed(model):
    """As TRL wants it with ZeRO-3."""
    linears = model.base_model.model
    linears.forward = functools.partial(checkpoint, linears.forward, use_reentrant=True)
    return model


def fsdp1(rank, policy, train_base=False, change=lambda model: model, **options):
    model = change(ours(train_base))
    sharded = sharding.fsdp1(model, policy(model), **options)
    check_gathered(sharded)
    patch(sharded)  # again, of wrapped layers: changes nothing
    trained = [p for p in sharded.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=RATE)
    with torch.no_grad():
        sharded(batch(rank))  # FSDP hides from the views which of them are trained.
    output = sharded(batch(rank).requires_grad_())
    weighted(output).backward()
    optimizer.step()
    with torch.no_grad():
        moved = sharded(batch(rank))
    with FullyShardedDataParallel.summon_full_params(sharded):
        names = {n.replace("_fsdp_wrapped_module.", ""): p for n, p in sharded.named_parameters()}
        check_moved(rank, output.detach(), moved, names, train_base)


def weighted(output):
    weights = torch.linspace(-1, 1, output.numel(), device=output.device)
    return (output * weights.view(output.shape)).sum()


def check_moved(rank, output, moved, parameters, train_base=False):
    """Outputs before and after a step of SGD, and the parameters after it, as of one process."""
    first = dict(build(train_base).named_parameters())
    results, mean = reference(train_base)
    assert distance(output, results[rank].output) < 1e-5
    gradients = {n: (first[n] - parameters[n]).detach() / RATE for n in mean}
    assert_close(Result(moved, gradients), Result(after_a_step(rank, train_base), mean), 1e-4)


def zero3(rank, change=lambda model: model):
    if not sharding.DEEPSPEED:
        return  # test_a_group_of_processes skips it.
    model = change(ours())
    engine = sharding.zero3(model, len(batch(rank)), RATE)
    check_gathered(engine)
    patch(engine)  # again, of layers in shards: changes nothing
    output = engine(batch(rank).requires_grad_())
    engine.backward(weighted(output))
    engine.step()
    moved = engine(batch(rank)).detach()
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        check_moved(rank, output.detach(), moved, dict(model.named_parameters()))


CASES = {
    "fsdp1 at once": lambda rank: fsdp1(rank, lambda model: None, use_orig_params=True),
    "fsdp1 at once, base trained": lambda rank: fsdp1(
        rank, lambda model: None, train_base=True, use_orig_params=True
    ),
    "fsdp1 by leaf": lambda rank: fsdp1(rank, fsdp_auto_wrap_policy),
    "fsdp1 by leaf, parameters kept": lambda rank: fsdp1(
        rank, fsdp_auto_wrap_policy, use_orig_params=True
    ),
    "fsdp1 by leaf, checkpointed": lambda rank: fsdp1(
        rank, fsdp_auto_wrap_policy, change=checkpointed
    ),
    "ddp": ddp,
    "fsdp2 by layer": fsdp2,
    "fsdp2 by layer, kept whole": lambda rank: fsdp2(rank, reshard=False),
    "fsdp2 by leaf": lambda rank: fsdp2(rank, leaves=True),
    "fsdp2, base trained": lambda rank: fsdp2(rank, train_base=True),
    "fsdp2, base trained, kept whole": lambda rank: fsdp2(rank, train_base=True, reshard=False),
    "fsdp2 in bf16": fsdp2_bf16,
    "zero-3": zero3,
    "zero-3, checkpointed": lambda rank: zero3(rank, checkpointed),
}


def run_all(rank, device, file, paths, failures):
    """A process of the group: all cases, so that it starts only once."""
    sys.path[:0] = paths
    with sharding.group(rank, device, f"file://{file}"), tier("fused"):
        for name, case in CASES.items():
            try:
                case(rank)
            except BaseException as error:
                failures.put((name, rank, f"{type(error).__name__}: {error}"))


@pytest.fixture(scope="module", params=sharding.DEVICES)
def failures(request, tmp_path_factory):
    device = request.param
    if device == "cuda":
        assert _native.library is not None, "build libdorad_train.so first (make build)"
    queue = sharding.context(device).Queue()
    file = tmp_path_factory.mktemp("group") / "store"
    sharding.run(device, run_all, device, file, sys.path[:], queue)
    found = []
    while not queue.empty():
        found.append(queue.get())
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_group_of_processes(case, failures):
    if case.startswith("zero-3") and not sharding.DEEPSPEED:
        pytest.skip("deepspeed is not installed")
    assert [failure for failure in failures if failure[0] == case] == []
