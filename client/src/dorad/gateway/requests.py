"""Requests of the OpenAI API as pydantic models, which check and document their fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    Tag,
)

from dorad import types as t
from dorad.errors import Violation
from dorad.gateway import validation
from dorad.gateway.assembler import stops_of
from dorad.gateway.errors import Refusal
from dorad.gateway.messages import AnyMessage, Texts
from dorad.gateway.samples import Work
from dorad.gateway.validation import Body, M, TokenIds, UInt32, kind_of, union
from dorad.text import ModelText

# The server checks the ranges of sampling parameters. The models check the ranges of the wire.
StopString = Annotated[str, Field(min_length=1, max_length=256)]
# JSON's objects have strings as names.
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]


def _kind_of_prompt(value: Any) -> str | None:
    if value and isinstance(value, list):
        for kind, tag in ((str, "<strings>"), (list, "<lists>")):
            if isinstance(value[0], kind):
                return tag
    return kind_of(value)


Stop = Annotated[
    Annotated[StopString, Tag("<string>")]
    | Annotated[list[StopString], Field(max_length=16, fail_fast=True), Tag("<list>")],
    union(kind_of, "a string or a list of strings"),
]
Prompt = Annotated[
    Annotated[str, Tag("<string>")]
    | Annotated[list[str], Field(fail_fast=True), Tag("<strings>")]
    | Annotated[TokenIds, Field(min_length=1), Tag("<list>")]
    | Annotated[
        list[Annotated[TokenIds, Field(min_length=1)]], Field(fail_fast=True), Tag("<lists>")
    ],
    union(_kind_of_prompt, "a string, or a list of strings, token ids or lists of token ids"),
]


class Sampling(Body):
    """Sampling parameters that all APIs have."""

    temperature: float | None = None
    """Default 1; 0 is greedy."""
    top_p: float | None = None
    """Default 1."""
    top_k: int | None = Field(default=None, ge=-1, le=2**31 - 1)
    """-1 and 0: all tokens."""
    min_p: float | None = None
    """Default 0."""
    presence_penalty: float | None = None
    """Subtracted from the logit of each generated token. Default 0."""
    frequency_penalty: float | None = None
    """The same, times the token's number of occurrences. Default 0."""
    repetition_penalty: float | None = None
    """Divides positive logits of prompt and generated tokens, multiplies others. Default 1."""
    logit_bias: dict[TokenId, float] | None = None
    """Numbers that are added to the logits of tokens, by token id."""
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    """No other token is sampled."""
    bad_words: list[StopString] | None = Field(default=None, max_length=1024, fail_fast=True)
    """Words that a choice does not contain: as they are tokenized, with and without a space."""
    bad_words_token_ids: (
        Annotated[
            list[Annotated[TokenIds, Field(min_length=1)]], Field(max_length=4096, fail_fast=True)
        ]
        | None
    ) = None
    """The same as token ids."""
    seed: int | None = Field(default=None, ge=0, le=2**64 - 1)
    """The same seed repeats a sample."""
    min_tokens: UInt32 | None = None
    """No stop before this many tokens."""
    include_stop_str_in_output: bool = False
    """Keep the stop string in the text."""
    ignore_eos: bool = False
    """Do not stop at the model's own end tokens."""
    skip_special_tokens: bool = True
    """Special tokens have no text."""
    priority: int | None = Field(default=None, ge=-(2**31), le=2**31 - 1)
    """Lower values run first."""
    cache_salt: str = ""
    """Only requests with equal salts share cached prefixes."""
    stop: Stop | None = None
    """Strings that end a choice."""
    logprobs_mode: t.LogprobMode | None = None
    """Log-probabilities of the model itself ("raw"), of the distribution that is sampled from
    ("processed"), or after the temperature alone ("scaled"). Default: the gateway's
    --logprobs-mode."""
    drafts: list[TokenIds] | None = Field(default=None, fail_fast=True)
    """Guesses at the tokens of the first choices, in their order. They change the time alone."""
    ngram_drafts: bool | None = None
    """Guess tokens from repetitions, too. Default: the server's setting."""
    in_flight_policy: t.InFlightPolicy | None = None
    """What happens when the active version of the adapter moves. Needs a name without a version."""

    def options(self, text: ModelText | None) -> t.GenerateOptions:
        """`text`: for `bad_words`; there are none without a tokenizer."""
        biases = self.logit_bias or {}
        return {
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": {int(token): bias for token, bias in biases.items()},
            "allowed_token_ids": self.allowed_token_ids,
            "bad_words": [*(self.bad_words_token_ids or ()), *self._tokens_of_bad_words(text)],
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k if self.top_k and self.top_k > 0 else None,
            "min_p": self.min_p,
            "seed": self.seed,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "priority": self.priority,
            "cache_salt": self.cache_salt,
            "drafts": self.drafts,
            "ngram_drafts": self.ngram_drafts,
            "in_flight_policy": self.in_flight_policy,
        }

    def _tokens_of_bad_words(self, text: ModelText | None) -> list[list[int]]:
        """A word has other tokens at the beginning of a text than after a space."""
        if text is None:
            return []
        words: dict[tuple[int, ...], None] = {}
        for word in self.bad_words or ():
            for written in (word, " " + word.lstrip()):
                words[tuple(text.encode(written, special_tokens=False))] = None
        return [list(word) for word in words if word]

    def work(
        self,
        prompts: list[list[int]],
        options: t.GenerateOptions,
        model: t.ModelInfo,
        *,
        stream: bool,
        top_logprobs: int | None = None,
    ) -> Work:
        """The Generate calls of this request, and how their samples end. Raises Refusal."""
        n = options.get("n") or 1
        if len(options.get("drafts") or ()) > len(prompts) * n:
            message = f"more drafts than the {len(prompts) * n} choices"
            raise Refusal(400, "DRAFTS_TOO_MANY", message, param="drafts")
        eos = frozenset(() if self.ignore_eos else model.eos_token_ids)
        stop = self.stop or []
        return Work(
            prompts=prompts,
            options=options,
            stops=stops_of(
                [stop] if isinstance(stop, str) else stop,
                [*eos, *(options.get("stop_token_ids") or ())],
                include=self.include_stop_str_in_output,
                min_tokens=self.min_tokens or 0,
            ),
            n=n,
            stream=stream,
            eos_token_ids=eos,
            skip_special_tokens=self.skip_special_tokens,
            top_logprobs=top_logprobs,
        )


class StreamOptions(Body):
    include_usage: bool = False
    """One more event at the end, with the usage."""


class OpenAIRequest(Sampling):
    """Fields that completions and chats have in common."""

    model: str
    """The base model's id, an adapter's name or name@version."""
    n: int = Field(default=1, ge=1, le=2**32 - 1)
    """Choices of each prompt."""
    stop_token_ids: TokenIds | None = None
    """Tokens that end a choice, besides the model's own."""
    stream: bool = False
    """Answer with server-sent events."""
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    """Add the token ids of prompt and choices."""
    return_tokens_as_token_ids: bool = False
    """Log-probabilities name tokens "token_id:7" instead of by their text."""
    prompt_logprobs: UInt32 | None = None
    """Raw log-probabilities of the prompt's tokens, also of this many most likely tokens. Not with
    stream."""
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, le=2**32 - 1)
    """Keep this many tokens at the end of a longer prompt; -1: all that fit into the context beside
    max_tokens."""

    def options(self, text: ModelText | None) -> t.GenerateOptions:
        return {
            **super().options(text),
            "n": self.n,
            "stop_token_ids": self.stop_token_ids,
            "prompt_logprobs": self.prompt_logprobs is not None,
        }

    def logprob_options(
        self, mode: t.LogprobMode | None, top_logprobs: int | None
    ) -> t.GenerateOptions:
        """One number of alternatives for answer and prompt: the larger one."""
        wanted = [k for k in (top_logprobs, self.prompt_logprobs) if k is not None]
        return {"logprobs": mode, "top_logprobs": max(wanted, default=None)}

    def kept(self, prompt: list[int], model: t.ModelInfo, max_tokens: int | None) -> list[int]:
        """The prompt after truncation."""
        count = self.truncate_prompt_tokens
        if count == -1:
            count = max(model.context_length - (1 if max_tokens is None else max_tokens), 1)
        return prompt if count is None else prompt[-count:]

    def check_logprobs(self) -> None:
        """Raises Refusal."""
        if self.prompt_logprobs is not None and self.stream:
            message = "prompt_logprobs are not available with stream"
            raise Refusal(400, "FIELD_UNSUPPORTED", message, param="prompt_logprobs")
        if self.truncate_prompt_tokens == 0:
            message = "truncate_prompt_tokens must be at least 1, or -1"
            raise Refusal(400, "FIELD_INVALID", message, param="truncate_prompt_tokens")


def _number_of_logprobs(value: Any) -> Any:
    """Clients of vLLM send true."""
    return (1 if value else None) if isinstance(value, bool) else value


class CompletionRequest(OpenAIRequest):
    prompt: Prompt
    """One prompt or several, as text or as token ids."""
    max_tokens: UInt32 | None = None
    """Default 16; 0 only with echo."""
    logprobs: Annotated[UInt32 | None, BeforeValidator(_number_of_logprobs)] = None
    """Log-probabilities, also of this many most likely tokens. true: of one."""
    echo: bool = False
    """Begin each choice with its prompt."""
    best_of: UInt32 | None = None
    """Must equal n."""
    add_special_tokens: bool = True
    """Add the tokenizer's special tokens, such as the begin token."""


class Templated(Body):
    """Fields of requests whose prompt is a conversation."""

    add_generation_prompt: bool = True
    """End the prompt where the assistant begins."""
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Variables for the chat template."""

    def template_variables(self) -> dict[str, Any]:
        return {"add_generation_prompt": self.add_generation_prompt, **self.chat_template_kwargs}


class Prediction(Body):
    type: Literal["content"]
    content: Texts
    """What the answer will mostly be, as of a message: a text, or parts of type text."""

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part["text"] for part in self.content)


class ChatRequest(OpenAIRequest, Templated):
    messages: list[AnyMessage] = Field(min_length=1, fail_fast=True)
    """The conversation."""
    prediction: Prediction | None = None
    """A guess at the text of every choice, in place of `drafts`. It changes the time alone."""
    max_tokens: UInt32 | None = None
    """The older name of max_completion_tokens."""
    max_completion_tokens: UInt32 | None = None
    """Default: all that fits into the context."""
    logprobs: bool = False
    """Log-probabilities of the choice's tokens."""
    top_logprobs: UInt32 | None = None
    """With logprobs: also of this many most likely tokens."""


# Fields without effect.
_IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prediction",  # Of a completion: only chats have it.
    "parallel_tool_calls",
)
# Fields that the gateway does not serve, with their values that ask for nothing. A model's own
# field of the same name is not meant.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
    "logits_processors": ([],),
    "detokenize": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "request_id": (),
    "add_special_tokens": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "reasoning_effort": (),
    "include_reasoning": (True,),
    "verbosity": ("medium",),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "modalities": (["text"], []),
    "audio": (),
    "web_search_options": (),
    "mm_processor_kwargs": ({},),
    "features": (),
    "content_parts": ([],),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "stream_options.include_obfuscation": (False,),
    "stream_options.continuous_usage_stats": (False,),
}


def checked(body: Mapping[str, Any], model: type[M]) -> M:
    """The body as `model`. Raises Refusal that lists the problems of every field.

    A field that the server cannot honour is refused: an answer without the requested penalty or
    tools would be wrong.
    """
    problems: list[Violation] = []
    kept = _served(body, model, "", problems)
    options = kept.get("stream_options")
    if isinstance(options, dict) and "stream_options" in model.model_fields:
        kept["stream_options"] = _served(options, StreamOptions, "stream_options.", problems)
    return validation.checked(kept, model, problems)


def _served(
    body: Mapping[str, Any], model: type[Body], path: str, problems: list[Violation]
) -> dict[str, Any]:
    """The fields for the model. Adds the others that ask for something to `problems`."""
    kept = {}
    for name, value in body.items():
        neutral = None if name in model.model_fields else _NEUTRAL.get(path + name)
        if not path and name in _IGNORED and name not in model.model_fields:
            continue
        if neutral is None:
            kept[name] = value
        elif value is not None and not any(_equal(value, it) for it in neutral):
            problems.append(Violation(path + name, "is not supported", "FIELD_UNSUPPORTED"))
    return kept


def _equal(value: Any, neutral: Any) -> bool:
    """As in JSON, where true is not 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
