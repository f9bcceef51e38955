"""verl's settings: what they mean for the server and for each request, and what is refused.

docs/guides/verl.md has the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# As a trainer of verl computes them: log-softmax of the logits divided by the temperature.
_LOGPROBS = {"processed_logprobs": "scaled", "raw_logprobs": "raw"}
_DTYPES = {"auto": "auto", "bfloat16": "bf16", "float32": "fp32"}
_PARALLEL = (
    "tensor_model_parallel_size",
    "data_parallel_size",
    "pipeline_model_parallel_size",
    "expert_parallel_size",
)
# Sampling parameters that mean the same to the server.
_PASSED = (
    "temperature",
    "top_p",
    "min_p",
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_token_ids",
    "stop_token_ids",
    "ignore_eos",
    "seed",
)
_TRANSLATED = ("max_tokens", "max_new_tokens", "top_k", "logprobs", "n")
_ALL_QUEUED_TOKENS = 1 << 40  # Ray limits the requests.


def _field(config: Any, name: str, default: Any = None) -> Any:
    """Of a dataclass, or of OmegaConf's. None counts as absent."""
    value = getattr(config, name, None)
    return default if value is None else value


def problems(rollout: Any, model: Any) -> list[str]:
    """What cannot be honoured.

    Args:
      rollout: actor_rollout_ref.rollout.
      model: actor_rollout_ref.model.
    """
    return _model_problems(model) + _rollout_problems(rollout)


def _model_problems(model: Any) -> list[str]:
    found = []
    lora = _field(model, "lora", {})
    rank = lora.get("rank", 0) or _field(model, "lora_rank", 0)
    if rank <= 0:
        found.append(
            "model.lora_rank=0: dorad serves LoRA and DoRA over a fixed base model; set lora_rank "
            "(beside lora_adapter_path, too, which verl ignores without it)"
        )
    if lora.get("merge", False):
        found.append("model.lora.merge=True sends merged weights; dorad takes the adapter alone")
    if _field(_field(model, "hf_config"), "quantization_config") is not None:
        found.append("the base model is quantised: the server computes with the original weights")
    return found


def _rollout_problems(rollout: Any) -> list[str]:
    found = [
        f"rollout.{name}={_field(rollout, name)}: each server computes on one device; set it to 1"
        for name in _PARALLEL
        if _field(rollout, name, 1) != 1
    ]
    backend = _field(_field(rollout, "checkpoint_engine"), "backend", "naive")
    if backend != "naive":
        found.append(
            f"rollout.checkpoint_engine.backend={backend!r} sends whole weights without the "
            "adapter's configuration; set it to 'naive'"
        )
    for name, table in (("dtype", _DTYPES), ("logprobs_mode", _LOGPROBS)):
        if _field(rollout, name, next(iter(table))) not in table:
            found.append(
                f"rollout.{name}={_field(rollout, name)!r} is not one of {', '.join(table)}"
            )
    if _field(rollout, "scheduling_policy", "fcfs") != "fcfs":
        found.append(
            f"rollout.scheduling_policy={rollout.scheduling_policy!r}: verl sends priorities to "
            "vLLM only; set it to 'fcfs'"
        )
    mtp = _field(rollout, "mtp")
    absent = {
        "quantization": _field(rollout, "quantization"),
        "qat.enable": _field(rollout, "qat", {}).get("enable"),
        "mtp.enable_rollout": _field(mtp, "enable") and _field(mtp, "enable_rollout"),
        "enable_rollout_routing_replay": _field(rollout, "enable_rollout_routing_replay"),
        "prometheus.enable": _field(_field(rollout, "prometheus"), "enable"),
        "profiler.enable": _field(_field(rollout, "profiler"), "enable"),
    }
    found += [
        f"rollout.{name}={value}: the server has no such thing; unset it"
        for name, value in absent.items()
        if value
    ]
    return found


def server_settings(rollout: Any, device: str) -> dict[str, object]:
    """The server's configuration. `rollout.engine_kwargs.dorad` adds to it and overrides it."""
    values: dict[str, object] = {
        "model.device": device,
        "model.compute_dtype": _DTYPES[_field(rollout, "dtype", "auto")],
        "model.max_context": _field(rollout, "max_model_len", 0),
        "engine.max_running_sequences": rollout.max_num_seqs,
        "engine.prefix_cache": bool(rollout.enable_prefix_caching),
        "limits.max_queued_tokens": _ALL_QUEUED_TOKENS,
    }
    if _field(rollout, "limit_images"):
        values["limits.max_images"] = rollout.limit_images
    if device == "cuda":
        values["memory.vram_limit"] = float(rollout.gpu_memory_utilization)
        values["memory.host_weights"] = bool(rollout.free_cache_engine)  # It sleeps at each step.
    return values | _flat(_field(rollout, "engine_kwargs", {}).get("dorad") or {})


def keeps_answers(rollout: Any) -> bool:
    """`rollout.engine_kwargs.dorad_answers`."""
    return bool(_field(rollout, "engine_kwargs", {}).get("dorad_answers"))


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """{"engine": {"kv_bytes": "8GiB"}} as {"engine.kv_bytes": "8GiB"}."""
    found: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        elif value is not None:
            found[f"{prefix}{name}"] = value
    return found


def request_options(
    rollout: Any, prompt: Sequence[int], given: Mapping[str, Any], context_length: int
) -> dict[str, Any]:
    """The options of `generate` for verl's sampling parameters.

    Raises ValueError for a parameter that the server does not have.
    """
    # None asks for nothing.
    params = {name: value for name, value in given.items() if value is not None}
    unknown = sorted(params.keys() - {*_PASSED, *_TRANSLATED})
    if unknown:
        raise ValueError(
            f"sampling parameters {', '.join(unknown)}: dorad knows "
            f"{', '.join(sorted((*_PASSED, *_TRANSLATED)))}"
        )
    if params.get("n", 1) != 1:
        raise ValueError(f"n={params['n']}: verl's servers give one answer to a request")
    options: dict[str, Any] = {
        "temperature": 1.0,
        "repetition_penalty": _field(rollout, "repetition_penalty"),
        "ignore_eos": bool(_field(rollout, "ignore_eos", False)),
    }
    options |= {name: params[name] for name in _PASSED if name in params}
    top_k = params.get("top_k", 0)
    options["top_k"] = top_k if top_k > 0 else None
    options["max_tokens"] = _max_tokens(rollout, len(prompt), params, context_length)
    if params.get("logprobs"):
        # Divided by a temperature of 0 there are none.
        mode = _LOGPROBS[_field(rollout, "logprobs_mode", "processed_logprobs")]
        options["logprobs"] = mode if options["temperature"] > 0 else "raw"
    return options


def _max_tokens(
    rollout: Any, prompt_tokens: int, params: Mapping[str, Any], context_length: int
) -> int:
    room = context_length - prompt_tokens
    if room < 1:
        raise ValueError(
            f"a prompt of {prompt_tokens} tokens leaves no room in a context of {context_length}"
        )
    # Without a limit an answer of several turns has what the turns before it have left.
    left = rollout.prompt_length + rollout.response_length - prompt_tokens
    wanted = params.get("max_tokens", params.get("max_new_tokens"))
    if wanted is None:
        wanted = min(rollout.response_length, left)
    return max(1, min(int(wanted), room))
