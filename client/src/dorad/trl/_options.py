"""The options with which TRL's trainers construct their VLLMGeneration, and what becomes of them.

docs/guides/trl.md has the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

# vLLM's sampling parameters by which `generation_kwargs` may change what is sampled. The others
# either would break what the trainer assumes (temperature, n) or are unknown to the server.
_PASSED = frozenset(
    {
        "allowed_token_ids",
        "frequency_penalty",
        "ignore_eos",
        "logit_bias",
        "min_tokens",
        "presence_penalty",
        "seed",
        "stop_token_ids",
    }
)


@dataclass
class Options:
    """As in trl.generation.vllm_generation.VLLMGeneration, without its first three arguments.

    Some have no effect here: they are about vLLM's process or its weight transfer.
    """

    mode: str = "colocate"
    structured_outputs_regex: str | None = None
    server_base_url: str | None = None
    server_host: str = "0.0.0.0"
    server_port: int = 8000
    server_timeout: float = 240.0
    group_port: int = 51216
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    max_model_length: int | None = None
    max_num_seqs: int | None = None
    enable_sleep_mode: bool = False
    model_impl: str = "auto"
    trust_remote_code: bool = False
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = 0.0
    max_completion_length: int = 16
    logprobs: int | None = 0
    generation_kwargs: Mapping[str, Any] | None = field(default_factory=dict)

    @property
    def further(self) -> dict[str, Any]:
        """The options of `generation_kwargs`."""
        return dict(self.generation_kwargs or {})

    def problems(self) -> list[str]:
        """What cannot be honoured."""
        found = []
        if self.structured_outputs_regex is not None:
            found.append(
                "vllm_structured_outputs_regex: the server has no structured outputs; unset it"
            )
        if self.server_base_url is not None:
            found.append(
                f"vllm_server_base_url={self.server_base_url!r} is an address of vLLM; unset it, "
                "and give served() the address of a dorad server"
            )
        if self.tensor_parallel_size != 1:
            found.append(
                f"vllm_tensor_parallel_size={self.tensor_parallel_size}: the server computes on "
                "one device; set it to 1"
            )
        if self.logprobs not in (None, 0):
            found.append(f"logprobs={self.logprobs}: only sampled tokens have log-probabilities")
        for name in sorted(self.further.keys() - _PASSED):
            found.append(
                f"generation_kwargs[{name!r}] is not one of {', '.join(sorted(_PASSED))}; unset it"
            )
        return found

    def request_options(self, eos_token_ids: Iterable[int]) -> dict[str, Any]:
        """The fields of a GenerateRequest that all prompts share.

        A sample ends with one of `eos_token_ids`, the trainer's, and not with others of the model:
        the trainer would take such a sample for truncated.
        """
        further = self.further
        stops = {int(token) for token in further.get("stop_token_ids") or ()}
        if not further.get("ignore_eos"):
            stops.update(eos_token_ids)
        bias = further.get("logit_bias")
        return {
            "max_tokens": self.max_completion_length,
            "min_tokens": further.get("min_tokens"),
            "temperature": self.temperature,
            "top_k": self.top_k if self.top_k and self.top_k > 0 else None,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": further.get("presence_penalty"),
            "frequency_penalty": further.get("frequency_penalty"),
            "logit_bias": {int(token): value for token, value in bias.items()} if bias else None,
            "allowed_token_ids": further.get("allowed_token_ids"),
            "stop_token_ids": sorted(stops) or None,
            "ignore_eos": True,
            # As the trainer computes them: penalties, top-k, top-p and min-p do not count.
            "logprobs": None if self.logprobs is None else "scaled",
        }
