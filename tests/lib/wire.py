"""A plain client over the generated stubs: no retries, no defaults of its own, numpy in and out.

The tests talk to the server through this one, so that they see the wire as it is.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
from dorad.v1 import (
    adapters_pb2,
    adapters_pb2_grpc,
    control_pb2,
    control_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    types_pb2,
)
from google.rpc import error_details_pb2
from grpc_status import rpc_status

CHUNK = 1 << 20
DEADLINE = 60.0

STOP = types_pb2.FINISH_REASON_STOP
LENGTH = types_pb2.FINISH_REASON_LENGTH
ABORTED = types_pb2.FINISH_REASON_ABORTED
NON_FINITE = types_pb2.FINISH_REASON_NON_FINITE
RAW = inference_pb2.LOGPROB_MODE_RAW
PROCESSED = inference_pb2.LOGPROB_MODE_PROCESSED
SCALED = inference_pb2.LOGPROB_MODE_SCALED
FINAL = inference_pb2.RESPONSE_MODE_FINAL
STREAM = inference_pb2.RESPONSE_MODE_STREAM


def pack_ids(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype="<i4")


def unpack_floats(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype="<f4")


@dataclass
class Sample:
    """All that came of one sample."""

    tokens: list[int] = field(default_factory=list)
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    chosen: np.ndarray | None = None
    prompt: "Score | None" = None
    # (adapter, version, digest, begin, end)
    spans: list[tuple] = field(default_factory=list)
    finish: inference_pb2.Finish | None = None
    seed: int = 0
    messages: int = 0

    @property
    def reason(self) -> int:
        assert self.finish is not None, "the sample has not finished"
        return self.finish.reason


def _joined(before: np.ndarray | None, new: np.ndarray) -> np.ndarray:
    return new if before is None else np.concatenate([before, new])


def collect(messages, samples: dict[int, Sample] | None = None) -> dict[int, Sample]:
    """Folds responses into samples, and checks what the wire promises on the way."""
    samples = {} if samples is None else samples
    for message in messages:
        sample = samples.setdefault(message.sample_index, Sample())
        assert sample.finish is None, "a message after the sample's finish"
        tokens = unpack_ids(message.token_ids).tolist()
        begin = len(sample.tokens)
        sample.messages += 1
        sample.seed = message.seed
        sample.tokens += tokens
        if message.logprobs:
            values = unpack_floats(message.logprobs)
            assert len(values) == len(tokens)
            sample.logprobs = np.concatenate([sample.logprobs, values])
        if tokens and message.top_logprobs.k:
            shape = (len(tokens), message.top_logprobs.k)
            sample.top_ids = _joined(
                sample.top_ids, unpack_ids(message.top_logprobs.token_ids).reshape(shape)
            )
            sample.top_logprobs = _joined(
                sample.top_logprobs, unpack_floats(message.top_logprobs.logprobs).reshape(shape)
            )
        if tokens and message.chosen_logprobs:
            values = unpack_floats(message.chosen_logprobs).reshape(len(tokens), -1)
            sample.chosen = _joined(sample.chosen, values)
        if message.HasField("prompt_logprobs"):
            assert message.sample_index == 0 and begin == 0 and tokens
            sample.prompt = _score(message.prompt_logprobs)
        for span in message.spans:
            assert begin <= span.begin < span.end <= len(sample.tokens), span
            _add_span(sample.spans, span)
        if message.HasField("finish"):
            sample.finish = message.finish
    return samples


def _add_span(spans: list[tuple], span) -> None:
    version = (span.adapter, span.version, span.digest)
    if spans and spans[-1][:3] == version and spans[-1][4] == span.begin:
        spans[-1] = (*version, spans[-1][3], span.end)
    else:
        spans.append((*version, span.begin, span.end))


@dataclass
class Score:
    """One sequence under one adapter."""

    logprobs: np.ndarray
    top_ids: np.ndarray | None
    top_logprobs: np.ndarray | None
    chosen: np.ndarray | None


def _score(message: inference_pb2.SequenceScore) -> Score:
    logprobs = unpack_floats(message.logprobs)
    rows, k = len(logprobs), message.top_logprobs.k
    return Score(
        logprobs,
        unpack_ids(message.top_logprobs.token_ids).reshape(rows, k) if k else None,
        unpack_floats(message.top_logprobs.logprobs).reshape(rows, k) if k else None,
        unpack_floats(message.chosen_logprobs).reshape(rows, -1)
        if message.chosen_logprobs
        else None,
    )


def generate_request(
    prompt: Sequence[int],
    *,
    adapter: str = "",
    n: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    stop: Sequence[int] = (),
    stop_sequences: Sequence[Sequence[int]] = (),
    ignore_eos: bool = False,
    logprobs: int | None = None,
    top_logprobs: int | None = None,
    chosen: Sequence[int] = (),
    prompt_logprobs: bool = False,
    truncate: int | None = None,
    mode: int = FINAL,
    request_id: str | None = None,
    salt: str = "",
    bypass: bool = False,
    priority: int | None = None,
    in_flight: int = inference_pb2.IN_FLIGHT_POLICY_UNSPECIFIED,
    logit_bias: dict[int, float] | None = None,
    allowed: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    drafts: Sequence[Sequence[int]] = (),
    ngram_drafts: bool | None = None,
    **penalties: float,
) -> inference_pb2.GenerateRequest:
    """logprobs: a LogprobMode; None asks for none. penalties: presence_penalty and so on."""
    biases = logit_bias or {}
    params = None
    if logprobs is not None:
        params = inference_pb2.LogprobParams(
            mode=logprobs,
            top_k=top_logprobs,
            chosen_token_ids=pack_ids(chosen),
            prompt=prompt_logprobs,
        )
    return inference_pb2.GenerateRequest(
        request_id=request_id,
        prompt_token_ids=pack_ids(prompt),
        adapter=adapter,
        n=n,
        sampling=inference_pb2.SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            logit_bias_token_ids=pack_ids(list(biases)),
            logit_biases=np.array(list(biases.values()), "<f4").tobytes(),
            allowed_token_ids=pack_ids(allowed),
            bad_words=[inference_pb2.TokenSequence(token_ids=pack_ids(w)) for w in bad_words],
            **penalties,
        ),
        stop=inference_pb2.StopParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=pack_ids(stop),
            stop_sequences=[
                inference_pb2.TokenSequence(token_ids=pack_ids(ids)) for ids in stop_sequences
            ],
            ignore_eos=ignore_eos,
        ),
        logprobs=params,
        response_mode=mode,
        cache_salt=salt,
        bypass_prefix_cache=bypass,
        priority=priority,
        in_flight_policy=in_flight,
        truncate_prompt_tokens=truncate,
        drafts=[inference_pb2.TokenSequence(token_ids=pack_ids(draft)) for draft in drafts],
        ngram_drafts=ngram_drafts,
    )


class Wire:
    """One channel to one server. Thread-safe, as its channel is."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.channel = grpc.insecure_channel(
            target,
            options=[
                ("grpc.max_receive_message_length", -1),
                ("grpc.max_send_message_length", -1),
                ("grpc.enable_retries", 0),
                # Channels of one process would share a connection otherwise.
                ("grpc.use_local_subchannel_pool", 1),
            ],
        )
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.adapters = adapters_pb2_grpc.AdapterServiceStub(self.channel)
        self.control = control_pb2_grpc.ControlServiceStub(self.channel)

    def close(self) -> None:
        self.channel.close()

    # --- Inference.
    def stream(self, prompt: Sequence[int], *, timeout: float | None = DEADLINE, **options):
        """The call itself: iterate over its messages, or cancel it."""
        options.setdefault("mode", STREAM)
        return self.inference.Generate(generate_request(prompt, **options), timeout=timeout)

    def generate(
        self, prompt: Sequence[int], *, timeout: float | None = DEADLINE, **options
    ) -> list[Sample]:
        call = self.inference.Generate(generate_request(prompt, **options), timeout=timeout)
        samples = collect(call)
        assert sorted(samples) == list(range(options.get("n") or 1))
        assert all(sample.finish is not None for sample in samples.values())
        return [samples[index] for index in sorted(samples)]

    def generate_many(self, requests: list[dict], timeout: float = DEADLINE) -> list[list[Sample]]:
        """Starts all requests before it waits for any, so that the server batches them."""
        calls = [
            self.inference.Generate(generate_request(**request), timeout=timeout)
            for request in requests
        ]
        results = []
        for call in calls:
            samples = collect(call)
            results.append([samples[index] for index in sorted(samples)])
        return results

    def score_response(
        self,
        sequences: Sequence[Sequence[int]],
        adapters: Sequence[str] = (),
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        chosen: Sequence[int] = (),
        timeout: float | None = DEADLINE,
    ) -> inference_pb2.ScoreResponse:
        return self.inference.Score(
            inference_pb2.ScoreRequest(
                sequences=[
                    inference_pb2.TokenSequence(token_ids=pack_ids(ids)) for ids in sequences
                ],
                adapters=adapters,
                temperature=temperature,
                top_k=top_k,
                chosen_token_ids=pack_ids(chosen),
            ),
            timeout=timeout,
        )

    def score(self, sequences, adapters: Sequence[str] = (), **options) -> list[list[Score]]:
        """[sequence][adapter]."""
        response = self.score_response(sequences, adapters, **options)
        return [[_score(score) for score in sequence.scores] for sequence in response.sequences]

    def abort(self, *request_ids: str) -> int:
        ids = inference_pb2.RequestIds(request_ids=request_ids)
        request = inference_pb2.AbortRequest(requests=ids)
        return self.inference.Abort(request, timeout=DEADLINE).aborted

    # --- Adapters.
    def publish(self, name: str, folder: Path, *, timeout: float = DEADLINE, **begin):
        """Uploads a PEFT folder; keyword arguments go into PublishBegin."""
        image = (Path(folder) / "adapter_model.safetensors").read_bytes()
        config = (Path(folder) / "adapter_config.json").read_text()
        return self.publish_bytes(name, config, image, timeout=timeout, **begin)

    def publish_bytes(
        self, name: str, config: str | dict, image: bytes, *, timeout: float = DEADLINE, **begin
    ) -> adapters_pb2.PublishResponse:
        text = json.dumps(config) if isinstance(config, dict) else config
        begin.setdefault("safetensors_size", len(image))
        begin.setdefault("safetensors_sha256", hashlib.sha256(image).digest())
        parts = publish_parts(
            adapters_pb2.PublishBegin(name=name, adapter_config_json=text, **begin), image
        )
        return self.adapters.Publish(parts, timeout=timeout)

    def publish_memory(
        self, message: adapters_pb2.PublishFromMemoryRequest
    ) -> adapters_pb2.PublishFromMemoryResponse:
        return self.adapters.PublishFromMemory(message, timeout=DEADLINE)

    def publish_rest(
        self, begin: adapters_pb2.PublishBegin, image: bytes, offset: int
    ) -> adapters_pb2.PublishResponse:
        """Goes on with an upload of which `offset` bytes have come."""
        return self.adapters.Publish(publish_parts(begin, image, offset), timeout=DEADLINE)

    def upload(self, upload_id: str) -> adapters_pb2.GetUploadResponse:
        request = adapters_pb2.GetUploadRequest(upload_id=upload_id)
        return self.adapters.GetUpload(request, timeout=DEADLINE)

    def publish_path(
        self, name: str, path: Path, **options
    ) -> adapters_pb2.PublishFromPathResponse:
        request = adapters_pb2.PublishFromPathRequest(name=name, path=str(path), **options)
        return self.adapters.PublishFromPath(request, timeout=DEADLINE)

    def activate(self, name: str, version: int, expected_generation: int | None = None):
        return self.adapters.Activate(
            adapters_pb2.ActivateRequest(
                name=name, version=version, expected_generation=expected_generation
            ),
            timeout=DEADLINE,
        )

    def retire(self, name: str, version: int, force: bool = False):
        return self.adapters.Retire(
            adapters_pb2.RetireRequest(name=name, version=version, force=force), timeout=DEADLINE
        )

    def adapter(self, ref: str) -> types_pb2.AdapterVersion:
        return self.adapters.Get(adapters_pb2.GetRequest(adapter=ref), timeout=DEADLINE).adapter

    def list_adapters(self, name: str = "", page_size: int | None = None):
        token, result = "", []
        while True:
            request = adapters_pb2.ListRequest(name=name, page_size=page_size, page_token=token)
            page = self.adapters.List(request, timeout=DEADLINE)
            result += page.adapters
            token = page.next_page_token
            if not token:
                return result

    # --- Control.
    def info(self) -> control_pb2.GetInfoResponse:
        return self.control.GetInfo(control_pb2.GetInfoRequest(), timeout=DEADLINE)

    def pause(
        self,
        mode: int = control_pb2.PAUSE_MODE_KEEP,
        adapter: str = "",
        timeout: float = DEADLINE,
    ) -> int:
        request = control_pb2.PauseRequest(mode=mode, adapter=adapter, allow_missing=True)
        return self.control.Pause(request, timeout=timeout).affected

    def sleep(self, *tags: str, **options: bool) -> dict[str, int]:
        request = control_pb2.SleepRequest(tags=tags, **options)
        return dict(self.control.Sleep(request, timeout=DEADLINE).freed_bytes)

    def wake(self, *tags: str) -> None:
        self.control.Wake(control_pb2.WakeRequest(tags=tags), timeout=DEADLINE)

    def resume(self, adapter: str = "") -> None:
        self.control.Resume(control_pb2.ResumeRequest(adapter=adapter), timeout=DEADLINE)


def publish_parts(
    begin: adapters_pb2.PublishBegin, image: bytes, start: int = 0
) -> Iterator[adapters_pb2.PublishRequest]:
    yield adapters_pb2.PublishRequest(begin=begin)
    for offset in range(start, len(image), CHUNK):
        chunk = adapters_pb2.PublishChunk(offset=offset, data=image[offset : offset + CHUNK])
        yield adapters_pb2.PublishRequest(chunk=chunk)
    yield adapters_pb2.PublishRequest(commit=adapters_pb2.PublishCommit())


@dataclass(frozen=True)
class Failure:
    """What an RPC error says."""

    code: grpc.StatusCode
    message: str
    reason: str
    domain: str
    # (field, reason, description)
    violations: list[tuple[str, str, str]]
    retry_after: float | None
    metadata: dict[str, str]


def failure(error: grpc.RpcError) -> Failure:
    reason, domain, violations, retry_after = "", "", [], None
    metadata: dict[str, str] = {}
    status = rpc_status.from_call(error)
    for detail in status.details if status is not None else []:
        info, bad, retry = (
            error_details_pb2.ErrorInfo(),
            error_details_pb2.BadRequest(),
            error_details_pb2.RetryInfo(),
        )
        if detail.Unpack(info):
            reason, domain, metadata = info.reason, info.domain, dict(info.metadata)
        elif detail.Unpack(bad):
            violations += [
                (item.field, getattr(item, "reason", ""), item.description)
                for item in bad.field_violations
            ]
        elif detail.Unpack(retry):
            retry_after = retry.retry_delay.ToTimedelta().total_seconds()
    message = error.details() or ""
    return Failure(error.code(), message, reason, domain, violations, retry_after, metadata)
