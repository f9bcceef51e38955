"""The client's arguments and results: plain dataclasses with numpy arrays, no protobuf messages.

Token ids are int32, log-probabilities float32. The client neither keeps nor changes result objects
after returning them.
"""

from __future__ import annotations

import datetime
import enum
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import numpy as np
import numpy.typing as npt

from dorad.images import Image as Image
from dorad.server_info import EngineInfo as EngineInfo
from dorad.server_info import Limits as Limits
from dorad.server_info import ModelInfo as ModelInfo
from dorad.server_info import ServerInfo as ServerInfo

if TYPE_CHECKING:
    from dorad.answers import Answers

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
# Token ids as arguments: any one-dimensional sequence or array of integers.
TokenIds = Sequence[int] | npt.NDArray[Any]
LogprobMode = Literal["raw", "processed", "scaled"]
InFlightPolicy = Literal["pin", "switch_keep_kv", "switch_recompute"]


class FinishReason(enum.StrEnum):
    """Why a sample ended. Compares equal to its string."""

    STOP = "stop"
    """The sample ends with an end-of-sequence or stop token, or with a stop sequence."""
    LENGTH = "length"
    """max_tokens or the model's context length was reached."""
    ABORTED = "aborted"
    """Ended by abort, pause(mode="abort") or a forced retire. The tokens so far are valid."""
    NON_FINITE = "non_finite"
    """The logits became non-finite. The tokens so far are valid."""


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`; absent or None means the server's default."""

    images: Sequence[Image] | None
    """Images in the prompt, in the order of their offsets: see `dorad.images`."""
    adapter: str | None
    """An adapter's "name" (its active version), "name@version", or None for the base model."""
    n: int | None
    """Samples of this prompt; default 1."""
    max_tokens: int | None
    """Default: the rest of the context, at most the server's limit."""
    min_tokens: int | None
    """Stop tokens have probability 0 before this many tokens; default 0."""
    temperature: float | None
    """Default 1.0; 0 is greedy."""
    top_k: int | None
    """Sample from the k most likely tokens; default all."""
    top_p: float | None
    """Sample from the smallest set of cumulative probability >= top_p; default 1.0."""
    min_p: float | None
    """Drop tokens below min_p times the largest probability; default 0."""
    presence_penalty: float | None
    """Subtracted from the logit of each generated token; default 0, in [-2, 2]."""
    frequency_penalty: float | None
    """The same, times the token's number of occurrences; default 0, in [-2, 2]."""
    repetition_penalty: float | None
    """Divides positive logits and multiplies others, for each token of prompt and answer; default
    1, in (0, 100]."""
    logit_bias: Mapping[int, float] | None
    """Numbers in [-100, 100] that are added to the logits of tokens."""
    allowed_token_ids: TokenIds | None
    """No other token is sampled."""
    bad_words: Sequence[TokenIds] | None
    """Token sequences that a sample does not contain: the last token is not sampled where the
    generated tokens end with the others. The prompt does not count."""
    seed: int | None
    """Unsigned 64-bit; sample i draws from (seed, i, position). Default: the server's choice."""
    stop_token_ids: TokenIds | None
    """Further tokens that end a sample, besides the model's end-of-sequence tokens."""
    stop_sequences: Sequence[TokenIds] | None
    """Sequences of tokens that end a sample; the tokens stay in it."""
    ignore_eos: bool
    """Do not stop at the model's end-of-sequence tokens."""
    logprobs: LogprobMode | None
    """As "raw": log_softmax of the logits. "processed": of the distribution sampled from.
    "scaled": log_softmax of the logits divided by the temperature, before all else."""
    top_logprobs: int | None
    """Also the k most likely tokens of each position (implies logprobs="raw" if that is None)."""
    chosen_token_ids: TokenIds | None
    """Also the log-probabilities of these tokens at each position (implies "raw", too)."""
    prompt_logprobs: bool
    """Also the raw log-probabilities of the prompt's tokens (implies "raw", too)."""
    truncate_prompt_tokens: int | None
    """Keep this many tokens at the end of a longer prompt."""
    drafts: Sequence[TokenIds] | None
    """Guesses at the tokens of the first samples, such as the answers to the same prompt and seed
    under the adapter's last version; an empty list: none for this sample. They change the time, and
    nothing else."""
    ngram_drafts: bool | None
    """Also guess from repetitions in the prompt and the samples; default: the server's setting."""
    cache_salt: str
    """Prefix-cache entries are shared only between requests of equal salt."""
    bypass_prefix_cache: bool
    """Neither read nor fill the prefix cache."""
    priority: int | None
    """Lower runs first; default 0."""
    in_flight_policy: InFlightPolicy | None
    """When the active version of the adapter moves: "pin" (default) keeps the request's first
    version; "switch_keep_kv" and "switch_recompute" use the new one from the next token on and keep
    or recompute the KV of earlier tokens. Needs a name without version.
    """
    request_id: str | None
    """Names the request in `abort` and in logs; default: a random one."""


class ManyOptions(GenerateOptions, total=False):
    """Keyword arguments of `generate_many` besides `return_errors`; described there."""

    concurrency: int
    progress: Callable[[int, int], None] | None
    answers: Answers | None
    timeout: float | None
    retry_for: float | None


class PublishOptions(TypedDict, total=False):
    """The arguments of a pool's publish: keyword arguments of `Client.publish`, described there."""

    path: str | os.PathLike[str] | None
    tensors: Mapping[str, Any] | None
    model: Any
    model_adapter: str | None
    config: Any
    server_side: bool
    durable: bool
    tags: Mapping[str, str] | None
    keep_last: int | None
    pinned: bool
    retry_for: float | None


@dataclass(slots=True)
class GenerateRequest:
    """One prompt for `generate_many`; the fields are those of `GenerateOptions`."""

    token_ids: TokenIds
    images: Sequence[Image] | None = None
    adapter: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Sequence[TokenIds] | None = None
    seed: int | None = None
    stop_token_ids: TokenIds | None = None
    stop_sequences: Sequence[TokenIds] | None = None
    ignore_eos: bool = False
    logprobs: LogprobMode | None = None
    top_logprobs: int | None = None
    chosen_token_ids: TokenIds | None = None
    prompt_logprobs: bool = False
    truncate_prompt_tokens: int | None = None
    drafts: Sequence[TokenIds] | None = None
    ngram_drafts: bool | None = None
    cache_salt: str = ""
    bypass_prefix_cache: bool = False
    priority: int | None = None
    in_flight_policy: InFlightPolicy | None = None
    request_id: str | None = None


def _pinned(name: str, version: int, digest: str) -> str:
    """As "name@version:digest"; without the digest while a version loads: it is not known yet."""
    return f"{name}@{version}" + (f":{digest[:12]}" if digest else "")


@dataclass(frozen=True, slots=True)
class Span:
    """The adapter version that produced tokens [begin, end) of a sample."""

    adapter: str
    """Adapter name; "" for the base model."""
    version: int
    digest: str
    begin: int
    end: int

    @property
    def label(self) -> str | None:
        """As "name@version", for people; None for the base model."""
        return f"{self.adapter}@{self.version}" if self.adapter else None

    @property
    def ref(self) -> str | None:
        """Pins requests to exactly this version, as AdapterVersion.ref; None for the base model."""
        return _pinned(self.adapter, self.version, self.digest) if self.adapter else None


@dataclass(frozen=True, slots=True)
class Usage:
    """A sample's counts and times. Times are in seconds from the request's admission."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    draft_tokens: int = 0
    """Tokens of guesses that the server verified."""
    accepted_draft_tokens: int = 0
    """Of them, those that were right."""
    queue_time: float = 0.0
    time_to_first_token: float = 0.0
    total_time: float = 0.0


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a sample."""

    reason: FinishReason
    stop_token_id: int | None
    """With STOP: the stop token that ended the sample; None: a stop sequence did."""
    stop_sequence: int | None
    """With STOP: the index of the stop sequence that ended the sample; None: a stop token did."""
    detail: str
    """The reason, for ABORTED and NON_FINITE."""
    usage: Usage


@dataclass(frozen=True, slots=True, eq=False)
class TopLogprobs:
    """The k most likely tokens of each position, most likely first. Unpacks as (ids, logprobs)."""

    token_ids: IntArray
    """int32 [positions, k]."""
    logprobs: FloatArray
    """float32 [positions, k]."""

    def __iter__(self) -> Any:
        return iter((self.token_ids, self.logprobs))


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """Raw log-probabilities of a prompt's tokens, those of `score`. Position 0 is NaN."""

    logprobs: FloatArray
    """float32 [prompt tokens]."""
    top_logprobs: TopLogprobs | None
    """[prompt tokens, k] if requested; ids of position 0 are -1."""
    chosen_logprobs: FloatArray | None
    """float32 [prompt tokens, chosen] if requested."""


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """New tokens of one sample of a stream."""

    request_id: str
    index: int
    """Index of the sample, from 0 to n - 1."""
    token_ids: IntArray
    """int32 [new]; may be empty on the last delta."""
    logprobs: FloatArray | None
    """float32 [new] if requested."""
    top_logprobs: TopLogprobs | None
    chosen_logprobs: FloatArray | None
    """float32 [new, chosen] if requested."""
    spans: list[Span]
    """Versions of these tokens; indices count from the sample's first token."""
    finish: Finish | None
    """Set on the sample's last delta."""
    seed: int
    prompt_logprobs: PromptLogprobs | None = None
    """With the first token of sample 0, if requested. The version of that token computed them."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One finished continuation of a prompt."""

    index: int
    """Index of the sample, from 0 to n - 1."""
    token_ids: IntArray
    """int32 [tokens], without the prompt."""
    logprobs: FloatArray | None
    """float32 [tokens] if requested."""
    top_logprobs: TopLogprobs | None
    chosen_logprobs: FloatArray | None
    """float32 [tokens, chosen] if requested."""
    finish_reason: FinishReason
    stop_token_id: int | None
    stop_sequence: int | None
    """Index of the stop sequence that ended the sample."""
    detail: str
    """The reason, for ABORTED and NON_FINITE."""
    spans: list[Span]
    """The adapter versions of the tokens; adjacent spans of one version are merged."""
    usage: Usage
    seed: int
    """The seed in effect; with equal parameters it reproduces the sample."""
    request_id: str
    prompt_logprobs: PromptLogprobs | None = None
    """If requested; one object for all samples of the prompt. None too if sample 0 has no token."""


@dataclass(frozen=True, slots=True, eq=False)
class ScoreResult(Sequence[list[FloatArray]]):
    """Log-probabilities of every sequence under every adapter.

    `result[s][a]` (or `result[s, a]`) is float32 [len(sequence s)]; position 0 is NaN, row t is the
    log-probability of token t given the tokens before it.
    """

    logprobs: list[list[FloatArray]]
    """`[sequence][adapter]`."""
    top_logprobs: list[list[TopLogprobs]] | None
    """`[sequence][adapter]`, [tokens, k]; ids of position 0 are -1. None unless requested."""
    chosen_logprobs: list[list[FloatArray]] | None
    """`[sequence][adapter]`, float32 [tokens, chosen]; None unless requested."""
    versions: list[Span]
    """The version of each adapter, in the request's order (begin and end are 0)."""
    request_id: str

    def __len__(self) -> int:
        return len(self.logprobs)

    @overload
    def __getitem__(self, key: int) -> list[FloatArray]: ...

    @overload
    def __getitem__(self, key: slice) -> list[list[FloatArray]]: ...

    @overload
    def __getitem__(self, key: tuple[int, int]) -> FloatArray: ...

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, tuple):
            sequence, adapter = key
            return self.logprobs[sequence][adapter]
        return self.logprobs[key]


@dataclass(frozen=True, slots=True)
class LoadTiming:
    """Seconds of a load, by stage."""

    read: float = 0.0
    validate: float = 0.0
    copy: float = 0.0
    norms: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """One immutable version of an adapter."""

    name: str
    version: int
    digest: str
    """Lower-case hex SHA-256 of the canonical content."""
    state: str
    """One of "loading", "ready", "retiring", "gone" or "failed"."""
    active: bool
    """True for the version of requests that name just `name`."""
    kind: str
    """Either "lora" or "dora"."""
    min_rank: int = 0
    max_rank: int = 0
    num_modules: int = 0
    num_parameters: int = 0
    resident_bytes: int = 0
    leases: int = 0
    """Requests that hold the version now."""
    failure: str = ""
    durable: bool = False
    """True for a version that survives a restart of the server."""
    resident: bool = True
    """False while the weights are evicted; a request reloads them."""
    in_host_memory: bool = False
    """True for weights with a host copy, for a fast reload."""
    timing: LoadTiming = field(default_factory=LoadTiming)
    create_time: datetime.datetime | None = None
    tags: dict[str, str] = field(default_factory=dict)
    generation: int = 0
    """The registry's generation in the answer that described this version."""

    @property
    def label(self) -> str:
        """As "name@version", for people."""
        return f"{self.name}@{self.version}"

    @property
    def ref(self) -> str:
        """Pins requests to exactly this version: "name@version:digest" (12 digits of the digest).

        Where a server without a store has restarted and counts from 1 again, it never names
        another version: the call raises NotFound.
        """
        return _pinned(self.name, self.version, self.digest)


@dataclass(frozen=True, slots=True)
class Activation:
    """The result of `activate`."""

    adapter: AdapterVersion
    previous_version: int
    """The version that was active before; 0 if none was."""
    generation: int


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One change of the adapter registry."""

    generation: int
    type: str
    """One of "published", "activated", "retired", "gone" or "failed"."""
    adapter: AdapterVersion


@dataclass(frozen=True, slots=True)
class TargetReport:
    """One server of a pool. Counts are of prompts, since the pool was made."""

    target: str
    state: str
    """One of "ready", "unavailable" (no answer) or "stale" (other versions active than the pool's,
    or none); prompts prefer ready servers."""
    versions: dict[str, int]
    """The active version of each adapter name, as just reported by the server."""
    outstanding: int
    """Outstanding prompts."""
    oldest: float
    """Seconds since the oldest of them was sent."""
    completed: int
    lost: int
    """Prompts that moved to another server: this one became unavailable, or lacked the version."""
    unexpected_version: int
    """Answers by a version that was not the pool's active one."""
    latency: float
    """Median seconds of the last 256 completed prompts; NaN before the first."""
    straggler: bool
    """Latency, or the oldest prompt's wait, is more than twice the pool's median latency."""
    queued: int
    """Requests of all clients in the server's queue."""
    running: int
    """Sequences of all clients that the server computes."""
