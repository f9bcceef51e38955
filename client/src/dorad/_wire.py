"""Converts between the wire (protobuf, packed bytes) and the client's types. Pure functions."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration

from dorad import types as t
from dorad._arguments import as_count, check_ids, filled, items
from dorad._packing import (
    chosen_of,
    logprobs_of,
    pack_allowed,
    pack_biases,
    pack_ids,
    pack_images,
    pack_optional,
    top_of,
    unpack_ids,
)
from dorad._stubs import adapters_pb2, control_pb2, inference_pb2, types_pb2
from dorad.errors import Internal

T = TypeVar("T")

_UTC = datetime.UTC


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos * 1e-9


def _enum_name(value: int, enum: Any, prefix: str) -> str:
    """ADAPTER_STATE_READY → "ready"; unknown numbers of a newer server stay numbers."""
    try:
        return str(enum.Name(value)).removeprefix(prefix).lower()
    except ValueError:
        return str(value)


def _one_of(value: str, known: Mapping[str, T], what: str) -> T:
    if value not in known:
        raise ValueError(f"{what} must be one of {', '.join(known)}, not {value!r}")
    return known[value]


# --- Routing --------------------------------------------------------------------------------------

ADAPTER_HEADER = "x-dorad-adapter"
_ADAPTER_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,126}[a-z0-9])?")


def routing(request: Any) -> tuple[tuple[str, str], ...]:
    """Metadata that names the request's adapter, for proxies that choose a server by it.

    The version is left out: all versions of an adapter belong to one server. Of several adapters
    the first one counts. Empty for the base model, and for an invalid name (the server refuses it).
    """
    if isinstance(request, inference_pb2.ScoreRequest):
        ref = next(filter(None, request.adapters), "")
    else:
        ref = getattr(request, "adapter", "") or getattr(request, "name", "")
    name = ref.partition("@")[0]
    return ((ADAPTER_HEADER, name),) if _ADAPTER_NAME.fullmatch(name) else ()


# --- Generate -------------------------------------------------------------------------------------


def as_requests(
    requests: Iterable[t.TokenIds | t.GenerateRequest], options: t.GenerateOptions
) -> list[t.GenerateRequest]:
    """Bare token ids take `options`. Raises TypeError before the first one is sent."""
    todo = [
        r if isinstance(r, t.GenerateRequest) else t.GenerateRequest(r, **options)
        for r in items(requests, "requests", "prompts")
    ]
    for i, request in enumerate(todo):
        check_ids(request.token_ids, f"requests[{i}]")
    return todo


def _in_flight_policy(policy: str | None) -> inference_pb2.InFlightPolicy.ValueType:
    known = {
        "pin": inference_pb2.IN_FLIGHT_POLICY_PIN,
        "switch_keep_kv": inference_pb2.IN_FLIGHT_POLICY_SWITCH_KEEP_KV,
        "switch_recompute": inference_pb2.IN_FLIGHT_POLICY_SWITCH_RECOMPUTE,
    }
    if policy is None:
        return inference_pb2.IN_FLIGHT_POLICY_UNSPECIFIED
    return _one_of(policy, known, "in_flight_policy")


def sampling_params(request: t.GenerateRequest) -> inference_pb2.SamplingParams:
    return filled(
        inference_pb2.SamplingParams,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        seed=request.seed,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        allowed_token_ids=pack_allowed(request.allowed_token_ids),
        bad_words=token_sequences(
            () if request.bad_words is None else request.bad_words, "bad_words"
        ),
        **pack_biases(request.logit_bias),
    )


def generate_request(request: t.GenerateRequest, *, stream: bool) -> inference_pb2.GenerateRequest:
    """The wire form; leaves out fields that the caller did not set."""
    message = filled(
        inference_pb2.GenerateRequest,
        prompt_token_ids=pack_ids(request.token_ids),
        images=pack_images(request.images),
        adapter=request.adapter or "",
        cache_salt=request.cache_salt,
        bypass_prefix_cache=request.bypass_prefix_cache,
        response_mode=(
            inference_pb2.RESPONSE_MODE_STREAM if stream else inference_pb2.RESPONSE_MODE_FINAL
        ),
        sampling=sampling_params(request),
        stop=filled(
            inference_pb2.StopParams,
            max_tokens=request.max_tokens,
            min_tokens=request.min_tokens,
            stop_token_ids=pack_optional(request.stop_token_ids, "stop_token_ids"),
            ignore_eos=request.ignore_eos,
            stop_sequences=token_sequences(request.stop_sequences or (), "stop_sequences"),
        ),
        n=request.n,
        priority=request.priority,
        in_flight_policy=_in_flight_policy(request.in_flight_policy),
        request_id=request.request_id,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        drafts=token_sequences(request.drafts or (), "drafts"),
        ngram_drafts=request.ngram_drafts,
    )
    if _wants_logprobs(request):
        message.logprobs.CopyFrom(
            filled(
                inference_pb2.LogprobParams,
                mode=_logprob_mode(request.logprobs or "raw"),
                top_k=as_count(request.top_logprobs or 0, "top_logprobs"),
                chosen_token_ids=pack_optional(request.chosen_token_ids, "chosen_token_ids"),
                prompt=request.prompt_logprobs,
            )
        )
    return message


def _wants_logprobs(request: t.GenerateRequest) -> bool:
    asked = (request.logprobs, request.top_logprobs, request.chosen_token_ids)
    return bool(request.prompt_logprobs) or any(it is not None for it in asked)


def token_sequences(
    sequences: Iterable[t.TokenIds], what: str
) -> list[inference_pb2.TokenSequence]:
    return [
        inference_pb2.TokenSequence(token_ids=pack_ids(ids, f"{what}[{i}]"))
        for i, ids in enumerate(items(sequences, what, "lists of token ids"))
    ]


def _logprob_mode(mode: str) -> inference_pb2.LogprobMode.ValueType:
    modes = {
        "raw": inference_pb2.LOGPROB_MODE_RAW,
        "processed": inference_pb2.LOGPROB_MODE_PROCESSED,
        "scaled": inference_pb2.LOGPROB_MODE_SCALED,
    }
    if mode not in modes:
        known = ", ".join(f'"{name}"' for name in modes)
        raise ValueError(f"logprobs must be {known} or None, not {mode!r}")
    return modes[mode]


def span(message: types_pb2.VersionSpan) -> t.Span:
    return t.Span(message.adapter, message.version, message.digest, message.begin, message.end)


def _finish(message: inference_pb2.Finish) -> t.Finish:
    usage = message.usage
    name = _enum_name(message.reason, types_pb2.FinishReason, "FINISH_REASON_")
    try:
        reason = t.FinishReason(name)
    except ValueError:
        raise Internal(f"the server sent finish reason {name!r}", code="INTERNAL") from None
    return t.Finish(
        reason=reason,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        stop_sequence=message.stop_sequence if message.HasField("stop_sequence") else None,
        detail=message.detail,
        usage=t.Usage(
            prompt_tokens=usage.prompt_tokens,
            cached_prompt_tokens=usage.cached_prompt_tokens,
            generated_tokens=usage.generated_tokens,
            preemptions=usage.preemptions,
            draft_tokens=usage.draft_tokens,
            accepted_draft_tokens=usage.accepted_draft_tokens,
            queue_time=_seconds(usage.queue_time),
            time_to_first_token=_seconds(usage.time_to_first_token),
            total_time=_seconds(usage.total_time),
        ),
    )


def delta(message: inference_pb2.GenerateResponse, request: t.GenerateRequest) -> t.Delta:
    """One message of a Generate stream."""
    ids = unpack_ids(message.token_ids)
    top, chosen = request.top_logprobs, request.chosen_token_ids
    return t.Delta(
        request_id=message.request_id,
        index=message.sample_index,
        token_ids=ids,
        logprobs=logprobs_of(message.logprobs, len(ids)) if _wants_logprobs(request) else None,
        top_logprobs=top_of(message.top_logprobs, len(ids), top) if top else None,
        chosen_logprobs=(
            chosen_of(message.chosen_logprobs, len(ids), len(chosen))
            if chosen is not None
            else None
        ),
        spans=[span(s) for s in message.spans],
        finish=_finish(message.finish) if message.HasField("finish") else None,
        seed=message.seed,
        prompt_logprobs=(
            _prompt_logprobs(message.prompt_logprobs, request)
            if message.HasField("prompt_logprobs")
            else None
        ),
    )


def _prompt_logprobs(
    message: inference_pb2.SequenceScore, request: t.GenerateRequest
) -> t.PromptLogprobs:
    rows = len(request.token_ids)
    if request.truncate_prompt_tokens is not None:
        rows = min(rows, request.truncate_prompt_tokens)
    top, chosen = request.top_logprobs, request.chosen_token_ids
    return t.PromptLogprobs(
        logprobs=logprobs_of(message.logprobs, rows),
        top_logprobs=top_of(message.top_logprobs, rows, top) if top else None,
        chosen_logprobs=(
            chosen_of(message.chosen_logprobs, rows, len(chosen)) if chosen is not None else None
        ),
    )


# --- Score ----------------------------------------------------------------------------------------


def score_request(
    sequences: Iterable[t.TokenIds],
    adapters: str | Sequence[str | None] | None,
    top_k: int | None,
    chosen_token_ids: t.TokenIds | None,
    temperature: float | None,
    priority: int | None,
    request_id: str | None,
    images: Sequence[Sequence[t.Image] | None] | None = None,
) -> inference_pb2.ScoreRequest:
    if isinstance(adapters, str):
        adapters = [adapters]
    return filled(
        inference_pb2.ScoreRequest,
        sequences=token_sequences(sequences, "sequences"),
        adapters=[
            "" if adapter is None else adapter
            for adapter in items(adapters or [None], "adapters", "names")
        ],
        temperature=temperature,
        top_k=top_k,
        chosen_token_ids=pack_optional(chosen_token_ids, "chosen_token_ids"),
        priority=priority,
        request_id=request_id,
        images=[
            image
            for i, of_sequence in enumerate(images or ())
            for image in pack_images(of_sequence, i, f"images[{i}]")
        ],
    )


def score_result(
    message: inference_pb2.ScoreResponse, lengths: Sequence[int], *, top_k: int, chosen: int | None
) -> t.ScoreResult:
    """`lengths` are the sequences' token counts, `chosen` the number of chosen ids (None: none)."""
    if len(message.sequences) != len(lengths):
        raise Internal(
            f"the server scored {len(message.sequences)} of {len(lengths)} sequences",
            code="INTERNAL",
        )
    pairs = [(q.scores, n) for q, n in zip(message.sequences, lengths, strict=True)]
    return t.ScoreResult(
        logprobs=[[logprobs_of(s.logprobs, n) for s in scores] for scores, n in pairs],
        top_logprobs=(
            [[top_of(s.top_logprobs, n, top_k) for s in scores] for scores, n in pairs]
            if top_k
            else None
        ),
        chosen_logprobs=(
            [[chosen_of(s.chosen_logprobs, n, chosen) for s in scores] for scores, n in pairs]
            if chosen is not None
            else None
        ),
        versions=[span(v) for v in message.versions],
        request_id=message.request_id,
    )


# --- Adapters -------------------------------------------------------------------------------------


def adapter_version(message: types_pb2.AdapterVersion, generation: int) -> t.AdapterVersion:
    timing = message.timing
    return t.AdapterVersion(
        name=message.name,
        version=message.version,
        digest=message.digest,
        state=_enum_name(message.state, types_pb2.AdapterState, "ADAPTER_STATE_"),
        active=message.active,
        durable=message.durable,
        resident=message.resident,
        in_host_memory=message.in_host_memory,
        kind=_enum_name(message.kind, types_pb2.AdapterKind, "ADAPTER_KIND_"),
        min_rank=message.min_rank,
        max_rank=message.max_rank,
        num_modules=message.num_modules,
        num_parameters=message.num_parameters,
        resident_bytes=message.resident_bytes,
        leases=message.leases,
        failure=message.failure,
        timing=t.LoadTiming(
            read=_seconds(timing.read),
            validate=_seconds(timing.validate),
            copy=_seconds(timing.copy),
            norms=_seconds(timing.norms),
            total=_seconds(timing.total),
        ),
        create_time=(
            message.create_time.ToDatetime(tzinfo=_UTC) if message.HasField("create_time") else None
        ),
        tags=dict(message.tags),
        generation=generation,
    )


def watch_event(message: adapters_pb2.WatchResponse) -> t.WatchEvent:
    return t.WatchEvent(
        generation=message.generation,
        type=_enum_name(message.type, adapters_pb2.WatchEventType, "WATCH_EVENT_TYPE_"),
        adapter=adapter_version(message.adapter, message.generation),
    )


# --- Control --------------------------------------------------------------------------------------


def pause_mode(mode: str) -> control_pb2.PauseMode.ValueType:
    modes = {
        "abort": control_pb2.PAUSE_MODE_ABORT,
        "wait": control_pb2.PAUSE_MODE_WAIT,
        "keep": control_pb2.PAUSE_MODE_KEEP,
    }
    return _one_of(mode, modes, "pause mode")


def gpu_share_request(
    share: float, time_to_live: float, limit_id: str
) -> control_pb2.LimitGpuShareRequest:
    message = filled(control_pb2.LimitGpuShareRequest, limit_id=limit_id, gpu_share=share)
    message.time_to_live.FromNanoseconds(round(time_to_live * 1e9))
    return message


def abort_request(
    request_ids: str | Iterable[str] | None, adapter: str | None, all: bool, allow_missing: bool
) -> inference_pb2.AbortRequest:
    if (request_ids is not None) + (adapter is not None) + all != 1:
        raise ValueError("abort needs exactly one of request_ids, adapter or all=True")
    if request_ids is not None:
        ids = (
            [request_ids]
            if isinstance(request_ids, str)
            else list(items(request_ids, "request_ids", "ids"))
        )
        return inference_pb2.AbortRequest(
            requests=filled(inference_pb2.RequestIds, request_ids=ids)
        )
    if adapter is not None:
        return filled(inference_pb2.AbortRequest, adapter=adapter, allow_missing=allow_missing)
    return inference_pb2.AbortRequest(all=True)


REPEATED = ("eos_token_ids", "paused_adapters", "pausing_adapters", "sleeping")


def server_info(message: control_pb2.GetInfoResponse) -> t.ServerInfo:
    def plain(source: Any, cls: Any) -> Any:
        values = {name: getattr(source, name) for name in cls.__dataclass_fields__}
        return cls(**{k: list(v) if k in REPEATED else v for k, v in values.items()})

    return t.ServerInfo(
        version=message.version,
        device=message.device,
        model=plain(message.model, t.ModelInfo),
        limits=plain(message.limits, t.Limits),
        engine=plain(message.engine, t.EngineInfo),
        generation=message.generation,
        uptime=_seconds(message.uptime),
        memory_bytes=dict(message.memory_bytes),
        shared_memory_socket=message.shared_memory_socket,
        shared_weight_bytes=message.shared_weight_bytes,
        peer_bytes_sent=message.peer_bytes_sent,
        peer_bytes_received=message.peer_bytes_received,
        instruction_set=message.instruction_set,
    )
