"""The trained adapter of a trainer's model: what may be served, and its whole tensors."""

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


def problems(model: Any) -> list[str]:
    """Why the model's policy is not one adapter over the base model that a server holds."""
    if not isinstance(model, PeftModel):
        return [
            f"the model is a {type(model).__name__} without an adapter: dorad serves LoRA and DoRA "
            "over a fixed base model; give the trainer a peft_config"
        ]
    found = []
    if len(model.active_adapters) != 1:
        found.append(f"the model has several active adapters: {list(model.active_adapters)}")
    if getattr(model.config, "quantization_config", None) is not None:
        found.append(
            "the base model is quantised: the server computes with the original weights, so its "
            "samples would be another policy's; load the model without a quantization_config"
        )
    others = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and "lora_" not in name
    ]
    if others:
        listed = ", ".join(others[:3]) + (", …" if len(others) > 3 else "")
        found.append(f"{len(others)} trained parameters are not LoRA's or DoRA's: {listed}")
    return found


class Policy:
    """The active adapter of a model. Every process of the training has one."""

    def __init__(self, model: PeftModel) -> None:
        self._model = model
        (self._adapter,) = model.active_adapters

    @property
    def config(self) -> Any:
        """PEFT's configuration."""
        return self._model.peft_config[self._adapter]

    def tensors(self, wrapped: torch.nn.Module, keep: bool) -> dict[str, torch.Tensor]:
        """The adapter's tensors by the names under which PEFT saves them; {} unless `keep`.

        Where FSDP or ZeRO-3 shard the model, every process must call this, and whole tensors are
        made of the adapter's shards only. Else they are the model's own memory, no copies.

        Args:
          wrapped: the model inside the wrappers of the training.
        """
        tensors = {}
        for name, tensor in self._whole(wrapped):
            if keep:
                tensors[self._saved_name(name)] = tensor
        return tensors

    def _saved_name(self, name: str) -> str:
        """PEFT leaves out the adapter's name, and of a magnitude that it is a weight."""
        before, _, after = name.rpartition(f".{self._adapter}")
        return before if before.endswith("lora_magnitude_vector") else before + after

    def _is_ours(self, name: str) -> bool:
        return "lora_" in name and f".{self._adapter}." in f"{name}."

    def _whole(self, wrapped: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        if any(isinstance(module, FSDP) for module in wrapped.modules()):
            yield from self._summoned(wrapped)
            return
        ours = {_plain(n): p for n, p in wrapped.named_parameters() if self._is_ours(_plain(n))}
        with _gathered([p for p in ours.values() if hasattr(p, "ds_id")]) as gathered:
            for name, parameter in ours.items():
                tensor = parameter.detach()
                if isinstance(tensor, DTensor):
                    tensor = tensor.full_tensor()
                yield name, tensor.to("cpu", copy=True) if gathered else tensor

    def _summoned(self, wrapped: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """From FSDP1: its modules with parameters of the adapter become whole, one by one."""
        shards = {_plain(n): m for n, m in wrapped.named_modules() if isinstance(m, FSDP)}
        for prefix, module in shards.items():
            inner = tuple(f"{n}." for n in shards if n != prefix and n.startswith(prefix))

            def own(
                module: FSDP = module, prefix: str = prefix, inner: tuple[str, ...] = inner
            ) -> dict[str, torch.Tensor]:
                found = ((_plain(n), p) for n, p in module.named_parameters(prefix))
                return {n: p for n, p in found if self._is_ours(n) and not n.startswith(inner)}

            # The outermost module must be the first. Without use_orig_params, a flat parameter does
            # not tell the names in it.
            flat = any(_FLAT in n for n, _ in module.named_parameters())
            if module is wrapped or flat or own():
                with FSDP.summon_full_params(module, recurse=False, writeback=False):
                    for name, parameter in own().items():
                        yield name, parameter.detach().to("cpu", copy=True)


def _plain(name: str) -> str:
    """Without what wrappers of modules insert."""
    for wrapper in _WRAPPERS:
        name = f"{name}.".replace(wrapper, "")[:-1]
    return name.removeprefix("module.")  # DistributedDataParallel


@contextmanager
def _gathered(parameters: list[Any]) -> Iterator[bool]:
    """Parameters of DeepSpeed's ZeRO-3 are whole inside of the block; whether there are any."""
    if not parameters:
        yield False
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters):
        yield True
