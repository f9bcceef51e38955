"""The trained adapter of a trainer's model: what may be served, and its whole tensors."""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftModel

from dorad._adapter_tensors import adapter_tensors


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
        """`adapter_tensors` of the model inside the wrappers of the training."""
        return adapter_tensors(wrapped, self._adapter, keep=keep)
