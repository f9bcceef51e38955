"""A server's own description: its model, its limits and the state of its engine."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The base model the server holds."""

    name: str
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    context_length: int
    num_parameters: int
    digest: str
    eos_token_ids: list[int]
    compute_dtype: str
    whole_context_length: int = 0
    """The model's own; `context_length` is less if the server's KV cache is too small for it."""
    whole_context_kv_bytes: int = 0
    """The server's `engine.kv_bytes` for a request of that length."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one request and of the queue."""

    max_tokens: int
    max_n: int
    max_logprobs_k: int
    max_chosen_ids: int
    max_queued_requests: int
    max_queued_tokens: int
    max_adapter_rank: int
    max_adapter_bytes: int
    max_images: int = 0
    """Of a prompt; 0: the server serves no images."""
    max_image_tokens: int = 0
    max_draft_tokens: int = 0
    """Of one request's drafts, all samples together; 0: drafts are refused."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The engine's current state."""

    running_sequences: int
    queued_requests: int
    kv_pages_total: int
    kv_pages_used: int
    kv_pages_cached: int
    kv_page_tokens: int
    steps: int
    paused: bool
    deterministic: bool
    adapter_leases: int
    paused_adapters: list[str]
    """Each "name" or "name@version" whose requests a pause has stopped."""
    frozen_requests: int
    """Number of requests frozen by these pauses."""
    sleeping: list[str] = field(default_factory=list)
    """The sleeping tags among "weights", "kv" and "adapters"."""
    gpu_share: float = 1.0
    """The largest share of time for steps; 1: no limit."""
    pausing: bool = False
    """A pause of everything waits for requests to end; new ones are refused."""
    pausing_adapters: list[str] = field(default_factory=list)
    """Each "name" or "name@version" with such a pause."""
    kv_layer_groups: int = 1
    """Of layers with keys and values: a page has `kv_page_tokens` tokens of one group."""
    kv_dtype: str = ""
    """The numbers of the KV cache: "fp32", "bf16" or "fp8"."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The result of `info`."""

    version: str
    device: str
    """Either "cpu" or "cuda"."""
    model: ModelInfo
    limits: Limits
    engine: EngineInfo
    generation: int
    """The adapter registry's generation."""
    uptime: float
    """Seconds."""
    memory_bytes: dict[str, int]
    """Resident bytes by kind."""
    shared_memory_socket: str = ""
    """Its absolute path on the server's host; "": none."""
    shared_weight_bytes: int = 0
    """The base weights' memory while it is leased."""
    peer_bytes_sent: int = 0
    """Of adapters to other servers, since the start."""
    peer_bytes_received: int = 0
    instruction_set: str = ""
    """Of a GPU's kernels, "sm90" or "mma"; "" on the CPU."""
