"""TRL's asynchronous trainers: each synchronisation publishes the adapter, LoRA or DoRA.

Their rollout worker generates in a process of its own, over HTTP: through `doractl gateway`. It
names a version of the policy as vLLM names an adapter: "NAME-v3".
"""

from __future__ import annotations

import contextlib
import uuid
from typing import Any

from dorad import Client, NotFound
from dorad._unsupported import UnsupportedError
from dorad.trl import _policy


class PolicyClient:
    """In the place of TRL's VLLMClient: publishes to the server instead of loading into vLLM.

    Requests in flight keep their version, so nothing is paused. Not thread-safe.
    """

    def __init__(self, client: Client, timeout: float) -> None:
        self._client = client
        self._timeout = timeout

    def wait_for_server_ready(self) -> None:
        self._client.wait_ready(self._timeout)

    def get_server_info(self) -> dict[str, Any]:
        """For `select_adapter_sync`, which needs nothing."""
        return {}

    def get_max_model_len(self) -> int:
        return self._client.info().model.context_length

    def load_lora_adapter(self, lora_name: str, lora_path: str) -> None:
        """Publishes a folder as a name of its own."""
        self._client.publish(lora_name, path=lora_path, pinned=True, retry_for=self._timeout)

    def unload_lora_adapter(self, lora_name: str) -> None:
        """Retires it; requests that hold it go on."""
        with contextlib.suppress(NotFound):
            self._client.retire(self._client.adapter(lora_name).ref)

    def pause(self) -> None:
        """Nothing: a version never changes."""

    def resume(self) -> None:
        """Nothing."""


def select_adapter_sync(server_info: Any, model: Any, args: Any) -> bool:
    """In the place of TRL's, which sends merged weights where vLLM serves no such adapter."""
    found = _policy.problems(model)
    if found:
        raise UnsupportedError(found)
    return True


def rename(trainer: Any, adapter: str | None) -> None:
    """TRL gives the policies of all runs one name; on a shared server each needs its own."""
    name = adapter or f"trl-{uuid.uuid4().hex[:12]}"
    trainer._lora_name = name
    options = getattr(trainer.rollout_worker, "_loop_kwargs", {})
    if "lora_name" in options:
        options["lora_name"] = name
