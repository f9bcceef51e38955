"""The whole tensors of one adapter of a model whose parameters may be in shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor

_FLAT = "_flat_param"  # FSDP1's name of the parameter that holds those of a module
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def adapter_tensors(
    model: torch.nn.Module, adapter: str | None = None, *, keep: bool = True
) -> dict[str, torch.Tensor]:
    """The tensors of one adapter by the names under which PEFT saves them, for `publish`.

        tensors = dorad.train.adapter_tensors(model, keep=rank == 0)  # in every process
        if rank == 0:
            client.publish("policy", tensors=tensors, config=peft_model.peft_config["default"])

    Where FSDP1, FSDP2 or ZeRO-3 shard the model, every process must call this, and whole tensors
    are made of the adapter's shards only: copies on the CPU with FSDP1 and ZeRO-3. Else they are
    the model's own memory, no copies.

    Args:
      model: a PeftModel, or what FSDP, DeepSpeed, DDP or torch.compile made of it.
      adapter: PEFT's name for it; None means the active one.
      keep: false: {}, in processes that do not need them.
    """
    prefix, peft_model = _peft_model(model)
    name = _adapter(peft_model, adapter)
    tensors = {}
    for parameter, tensor in _whole(model, name):
        if keep:
            tensors[_saved_name(parameter.removeprefix(prefix), name)] = tensor
    return tensors


def is_sharded(model: object) -> bool:
    """Whether it is a model whose parameters FSDP1, FSDP2 or ZeRO-3 hold in shards."""
    if not isinstance(model, torch.nn.Module):
        return False
    return any(isinstance(module, FSDP) for module in model.modules()) or any(
        isinstance(parameter, DTensor) or hasattr(parameter, "ds_id")
        for parameter in model.parameters()
    )


def _peft_model(model: torch.nn.Module) -> tuple[str, PeftModel]:
    """The PeftModel inside of wrappers, and what its parameters' plain names begin with."""
    for name, module in model.named_modules():
        if isinstance(module, PeftModel):
            plain = _plain(name)
            return f"{plain}." if plain else "", module
    raise TypeError(f"model must be or hold a peft.PeftModel, not {type(model).__name__}")


def _adapter(model: PeftModel, adapter: str | None) -> str:
    if adapter is None:
        active = list(model.active_adapters)
        if len(active) != 1:
            raise ValueError(f"name one of the model's adapters: active are {active}")
        return str(active[0])
    if adapter not in model.peft_config:
        raise ValueError(f"the model has no adapter {adapter!r}, only {sorted(model.peft_config)}")
    return adapter


def _saved_name(name: str, adapter: str) -> str:
    """PEFT leaves out the adapter's name, and of a magnitude that it is a weight."""
    before, _, after = name.rpartition(f".{adapter}")
    return before if before.endswith("lora_magnitude_vector") else before + after


def _belongs(name: str, adapter: str) -> bool:
    return "lora_" in name and f".{adapter}." in f"{name}."


def _whole(model: torch.nn.Module, adapter: str) -> Iterator[tuple[str, torch.Tensor]]:
    if any(isinstance(module, FSDP) for module in model.modules()):
        yield from _summoned(model, adapter)
        return
    plain = {_plain(name): parameter for name, parameter in model.named_parameters()}
    found = {name: parameter for name, parameter in plain.items() if _belongs(name, adapter)}
    with _gathered([p for p in found.values() if hasattr(p, "ds_id")]) as gathered:
        for name, parameter in found.items():
            tensor = parameter.detach()
            if isinstance(tensor, DTensor):
                tensor = tensor.full_tensor()
            yield name, tensor.to("cpu", copy=True) if gathered else tensor


def _summoned(model: torch.nn.Module, adapter: str) -> Iterator[tuple[str, torch.Tensor]]:
    """From FSDP1: its modules with parameters of the adapter become whole, one by one."""
    shards = {_plain(n): m for n, m in model.named_modules() if isinstance(m, FSDP)}
    for number, (prefix, module) in enumerate(shards.items()):
        inner = tuple(f"{n}." for n in shards if n != prefix and n.startswith(prefix))

        def own(
            module: FSDP = module, prefix: str = prefix, inner: tuple[str, ...] = inner
        ) -> dict[str, torch.Tensor]:
            found = ((_plain(n), p) for n, p in module.named_parameters(prefix))
            return {n: p for n, p in found if _belongs(n, adapter) and not n.startswith(inner)}

        # The outermost module must be the first. Without use_orig_params, a flat parameter does
        # not tell the names in it.
        flat = any(_FLAT in n for n, _ in module.named_parameters())
        if number == 0 or flat or own():
            with FSDP.summon_full_params(module, recurse=False, writeback=False):
                for name, parameter in own().items():
                    yield name, parameter.detach().to("cpu", copy=True)


def _plain(name: str) -> str:
    """Without what wrappers of modules insert."""
    for wrapper in _WRAPPERS:
        name = f"{name}.".replace(wrapper, "")[:-1]
    return name


@contextmanager
def _gathered(parameters: list[Any]) -> Iterator[bool]:
    """Parameters of DeepSpeed's ZeRO-3 are whole inside of the block; whether there are any."""
    if not parameters:
        yield False
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters):
        yield True
