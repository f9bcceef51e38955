"""Runs the prompts of one HTTP request on the server and merges their results."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dorad import _samples
from dorad import types as t
from dorad.errors import Internal
from dorad.gateway.assembler import Assembler, Piece, Stops
from dorad.gateway.servers import Calls
from dorad.text import ModelText


@dataclass(slots=True)
class Update:
    """New tokens of one choice."""

    index: int
    """Index of the choice: prompt * n + sample."""
    piece: Piece
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """The stop string, or the token of `stop_token_ids`, that ended the choice."""
    spans: list[t.Span] = field(default_factory=list)
    """The versions that generated the piece's tokens; indices count from the choice's first."""
    span: t.Span | None = None
    """The version that generated the newest token of the choice. None: it has no token yet."""
    prompt_logprobs: t.PromptLogprobs | None = None


@dataclass(slots=True)
class Tally:
    """Token counts of all accepted prompts and their choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    last: t.Usage | None = None
    """The server's usage of the sample that finished last."""

    def usage(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted_draft_tokens,
                "rejected_prediction_tokens": self.draft_tokens - self.accepted_draft_tokens,
            },
        }


@dataclass(frozen=True, slots=True)
class Work:
    """The Generate calls of one request."""

    prompts: Sequence[Sequence[int]]
    options: t.GenerateOptions
    stops: Stops
    n: int
    stream: bool
    eos_token_ids: frozenset[int]
    skip_special_tokens: bool = True
    top_logprobs: int | None = None
    """Alternatives of each token of an answer. The calls may ask for more, for the prompt."""
    tally: Tally = field(default_factory=Tally)


_PART = 32  # Tokens of a whole sample that are assembled before other tasks run.
_FINISH = {
    t.FinishReason.STOP: "stop",
    t.FinishReason.LENGTH: "length",
    t.FinishReason.ABORTED: "abort",
    t.FinishReason.NON_FINITE: "error",
}


async def updates(
    client: Calls, text: ModelText | None, work: Work, timeout: float
) -> AsyncGenerator[Update]:
    """Yields updates of all choices; the last update of a choice has a finish_reason.

    `aclose` cancels the calls that still run. Raises DoradError.
    """
    queue: asyncio.Queue[Update | BaseException | None] = asyncio.Queue(maxsize=256)
    turn = asyncio.Lock()

    async def one(number: int, prompt: Sequence[int]) -> None:
        run = _Prompt(number, prompt, client, text, work, timeout, turn)
        async with contextlib.aclosing(run.updates()) as incoming:
            async for update in incoming:
                await queue.put(update)

    async def all_of_them() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for number, prompt in enumerate(work.prompts):
                    group.create_task(one(number, prompt))
        except BaseExceptionGroup as errors:
            await queue.put(errors.exceptions[0])
        else:
            await queue.put(None)

    task = asyncio.create_task(all_of_them())
    try:
        while (item := await queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class _Prompt:
    """The Generate call of one prompt, with one assembler per sample."""

    def __init__(
        self,
        number: int,
        prompt: Sequence[int],
        client: Calls,
        text: ModelText | None,
        work: Work,
        timeout: float,
        turn: asyncio.Lock,
    ) -> None:
        """All prompts of a request share `turn`, so that other requests run after each part."""
        self._first = number * work.n
        self._prompt = prompt
        self._client = client
        self._work = work
        self._timeout = timeout
        self._turn = turn
        self._options: t.GenerateOptions = {**work.options}
        if (request_id := work.options.get("request_id")) is not None:
            self._options["request_id"] = f"{request_id}-{number}"
        if (drafts := work.options.get("drafts")) is not None:
            self._options["drafts"] = drafts[self._first : self._first + work.n]
        self._assemblers = [
            Assembler(text, work.stops, skip_special_tokens=work.skip_special_tokens)
            for _ in range(work.n)
        ]
        self._versions = [_Versions() for _ in range(work.n)]
        self._unfinished = set(range(work.n))
        self._answered = False

    async def updates(self) -> AsyncGenerator[Update]:
        work = self._work
        if not work.stream and not work.stops.strings:
            samples = await self._client.generate(
                self._prompt, timeout=self._timeout, **self._options
            )
            for sample in samples:
                for part in _in_parts(sample):
                    async with self._turn:
                        update = self._take(part)
                        await asyncio.sleep(0)
                    yield update
            return
        # Also for unary answers with stop strings, which end the call early.
        stream = self._client.stream(self._prompt, timeout=self._timeout, **self._options)
        async with stream:
            async for delta in stream:
                if delta.index in self._unfinished:
                    yield self._take(delta)
                if not self._unfinished:
                    return
        if self._unfinished:
            raise Internal(f"samples {sorted(self._unfinished)} never finished", code="INTERNAL")

    def _take(self, new: t.Delta) -> Update:
        assembler, tally = self._assemblers[new.index], self._work.tally
        if not self._answered:  # Until its first answer the server may refuse the prompt.
            self._answered = True
            tally.prompt_tokens += len(self._prompt)
        before = assembler.count
        logprobs = None if new.logprobs is None else new.logprobs.tolist()
        top = first_columns(new.top_logprobs, self._work.top_logprobs)
        piece = assembler.push(new.token_ids.tolist(), logprobs, top)
        update = Update(self._first + new.index, piece, prompt_logprobs=new.prompt_logprobs)
        finish = new.finish
        if finish is not None:
            tally.last = finish.usage
            tally.draft_tokens += finish.usage.draft_tokens
            tally.accepted_draft_tokens += finish.usage.accepted_draft_tokens
            if new.index == 0:
                tally.cached_tokens += finish.usage.cached_prompt_tokens
            rest = assembler.end()
            piece.text += rest.text
            piece.tokens += rest.tokens
            update.finish_reason = _FINISH[finish.reason]
            if finish.stop_token_id not in self._work.eos_token_ids:
                update.stop_reason = finish.stop_token_id
        if assembler.stopped is not None:
            update.finish_reason, update.stop_reason = "stop", assembler.stopped
        versions = self._versions[new.index]
        update.spans = versions.of_next(len(piece.tokens), new.spans)
        update.span = versions.newest
        tally.completion_tokens += assembler.count - before
        if update.finish_reason is not None:
            self._unfinished.discard(new.index)
        return update


def first_columns(top: t.TopLogprobs | None, count: int | None) -> t.TopLogprobs | None:
    """The `count` most likely tokens of each position."""
    if top is None or not count:
        return None
    return t.TopLogprobs(top.token_ids[:, :count], top.logprobs[:, :count])


class _Versions:
    """Cuts a sample's spans to its pieces, whose tokens may come later than the spans."""

    def __init__(self) -> None:
        self._ahead: list[t.Span] = []
        self._count = 0
        self.newest: t.Span | None = None
        """The last span of all pieces so far."""

    def of_next(self, tokens: int, new: Sequence[t.Span]) -> list[t.Span]:
        """The spans of the next tokens. `new` are the spans that have come."""
        begin, end = self._count, self._count + tokens
        self._count = end
        self._ahead += new
        found = [
            dataclasses.replace(span, begin=max(span.begin, begin), end=min(span.end, end))
            for span in self._ahead
            if span.begin < end
        ]
        self._ahead = [span for span in self._ahead if span.end > end]
        found = _samples.merge_spans(span for span in found if span.begin < span.end)
        if found:
            self.newest = found[-1]
        return found


def _in_parts(sample: t.Sample) -> Iterator[t.Delta]:
    """Splits a sample into deltas, like a stream."""
    count = len(sample.token_ids)
    for begin in range(0, max(count, 1), _PART):
        part, top = slice(begin, begin + _PART), sample.top_logprobs
        yield t.Delta(
            request_id=sample.request_id,
            index=sample.index,
            token_ids=sample.token_ids[part],
            logprobs=None if sample.logprobs is None else sample.logprobs[part],
            top_logprobs=top and t.TopLogprobs(top.token_ids[part], top.logprobs[part]),
            chosen_logprobs=None,
            spans=[] if begin else sample.spans,
            finish=None if begin + _PART < count else _finish_of(sample),
            seed=sample.seed,
            prompt_logprobs=None if begin else sample.prompt_logprobs,
        )


def _finish_of(sample: t.Sample) -> t.Finish:
    return t.Finish(
        reason=sample.finish_reason,
        stop_token_id=sample.stop_token_id,
        stop_sequence=sample.stop_sequence,
        detail=sample.detail,
        usage=sample.usage,
    )


@dataclass(slots=True)
class Choice:
    """One whole choice."""

    piece: Piece = field(default_factory=Piece)
    finish_reason: str = ""
    stop_reason: int | str | None = None
    spans: list[t.Span] = field(default_factory=list)
    span: t.Span | None = None
    """The version that generated the newest token."""
    prompt_logprobs: t.PromptLogprobs | None = None

    def add(self, update: Update) -> None:
        self.piece.text += update.piece.text
        self.piece.tokens += update.piece.tokens
        self.spans = _samples.merge_spans([*self.spans, *update.spans])
        self.span = update.span
        self.prompt_logprobs = update.prompt_logprobs or self.prompt_logprobs
        if update.finish_reason is not None:
            self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason


async def choices(
    client: Calls, text: ModelText | None, work: Work, timeout: float
) -> list[Choice]:
    """All choices, after the last has ended."""
    found = [Choice() for _ in range(len(work.prompts) * work.n)]
    async with contextlib.aclosing(updates(client, text, work, timeout)) as incoming:
        async for update in incoming:
            found[update.index].add(update)
    return found


def versions(spans: Sequence[t.Span], newest: t.Span | None) -> dict[str, Any]:
    """The field `dorad` of OpenAI's choices; none before the first token.

    `newest` is the version of the choice's newest token.
    """
    if newest is None:
        return {}
    shown = [{**_version(span), "begin": span.begin, "end": span.end} for span in spans]
    return {"dorad": {**_version(newest), "spans": shown}}


def _version(span: t.Span) -> dict[str, Any]:
    """The base model has no version."""
    if not span.adapter:
        return {"adapter": None, "version": None, "digest": None}
    return {"adapter": span.adapter, "version": span.version, "digest": span.digest}
