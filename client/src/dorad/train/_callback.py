"""`patch` for trainers of transformers and TRL, which may make the PEFT model themselves."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from dorad.train._patch import has_lora, patch


class PatchCallback(TrainerCallback):
    """Patches the trainer's model: `SFTTrainer(..., callbacks=[PatchCallback()])`.

    It does so when the trainer is constructed, before the model is wrapped or compiled, and again
    when training begins: for adapters that were added since, models of a `model_init`, and a
    callback that was added late. `strict` is that of `patch`, whose errors it raises.
    """

    def __init__(self, *, strict: bool = True) -> None:
        self._strict = strict

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if has_lora(kwargs["model"]):  # Another model may still get its adapter.
            patch(kwargs["model"], strict=self._strict)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        patch(kwargs["model"], strict=self._strict)
