"""`doractl generate`: streams text for one prompt from several adapters side by side."""

from __future__ import annotations

import asyncio
import enum
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group as RenderGroup
from rich.live import Live
from rich.table import Table
from rich.text import Text

import dorad
import dorad.aio
from dorad.cli.common import (
    Output,
    OutputOption,
    console,
    errors,
)
from dorad.cli.prompt import (
    AdapterOption,
    BaseOption,
    ModelOption,
    Prompt,
    TokenIdsOption,
    adapters_of,
    parse_ids,
    read,
)
from dorad.cli.server import Server, on_server

if TYPE_CHECKING:
    from dorad.text import TextStream


class Logprobs(enum.StrEnum):
    """Which log-probabilities to return."""

    RAW = "raw"
    PROCESSED = "processed"
    SCALED = "scaled"


@dataclass
class Answer:
    """One sample of one adapter, while it is generated."""

    adapter: str | None
    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    spans: list[dorad.Span] = field(default_factory=list)
    finish: dorad.Finish | None = None
    prompt_logprobs: dorad.PromptLogprobs | None = None
    seed: int = 0
    first: float | None = None
    """Seconds from the request to the first token, measured by the client."""
    seconds: float = 0.0
    decoder: TextStream | None = None

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text."""
        return None if self.decoder is None else self.decoder.stopped

    @property
    def ended(self) -> bool:
        return self.finish is not None or self.stop is not None

    def add(self, delta: dorad.Delta, elapsed: float) -> str:
        """Adds a delta and returns the new text. Ignores what comes behind a stop string."""
        if self.ended:
            return ""
        fresh = delta.token_ids.tolist()
        if fresh and self.first is None:
            self.first = elapsed
        self.seconds = elapsed
        self.token_ids += fresh
        self.spans += delta.spans
        self.seed = delta.seed
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        if delta.logprobs is not None:
            self.logprobs += delta.logprobs.tolist()
        self.finish = delta.finish or self.finish
        if self.decoder is None:
            new = "".join(f" {i}" for i in fresh)
            new = new if self.text else new.lstrip()
        else:
            new = self.decoder.push(fresh) + (self.decoder.finish() if self.finish else "")
            if self.stop is not None:
                self._cut(self.decoder.count)
        self.text += new
        return new

    def _cut(self, count: int) -> None:
        """Drops the tokens behind the one that completed the stop string."""
        del self.token_ids[count:], self.logprobs[count:]
        self.spans = [
            replace(span, end=min(span.end, count)) for span in self.spans if span.begin < count
        ]

    def label(self) -> str:
        ref = self.spans[-1].label if self.spans else self.adapter
        return (ref or "base") + (f" · {self.index}" if self.index else "")

    @property
    def reason(self) -> dorad.FinishReason | None:
        if self.stop is not None:
            return dorad.FinishReason.STOP
        return None if self.finish is None else self.finish.reason

    def summary(self) -> str:
        """One line: finish reason, tokens, time to first token and rate."""
        if self.reason is None:
            return f"{len(self.token_ids)} tokens"
        words = [self.reason.value, f"{len(self.token_ids)} tokens"]
        if self.finish is not None and self.finish.detail:
            words[0] += f" ({self.finish.detail})"
        if self.first is not None:
            words.append(f"first after {self.first * 1000:.0f} ms")
            if self.seconds > self.first and len(self.token_ids) > 1:
                rate = (len(self.token_ids) - 1) / (self.seconds - self.first)
                words.append(f"{rate:.1f} tokens/s")
        return ", ".join(words)

    def jsonable(self) -> dict[str, Any]:
        finish = self.finish
        return {
            "adapter": self.adapter,
            "index": self.index,
            "text": self.text if self.decoder is not None else None,
            "token_ids": self.token_ids,
            "logprobs": self.logprobs or None,
            "prompt_logprobs": self.prompt_logprobs and self.prompt_logprobs.logprobs,
            "finish_reason": self.reason,
            "stop": self.stop,
            "stop_token_id": finish and finish.stop_token_id,
            "stop_sequence": finish and finish.stop_sequence,
            "detail": finish.detail if finish else "",
            "spans": dorad._samples.merge_spans(self.spans),
            "usage": finish and finish.usage,
            "seed": self.seed,
        }


class Board:
    """Draws all answers, with one column for each adapter."""

    def __init__(self, columns: list[list[Answer]]) -> None:
        self.columns = columns

    def __rich__(self) -> Table:
        made = Table(expand=True, show_lines=len(self.columns[0]) > 1, header_style="bold")
        for column in self.columns:
            made.add_column(column[0].label(), ratio=1, overflow="fold")
        for row in zip(*self.columns, strict=True):
            made.add_row(*(RenderGroup(Text(a.text), Text(a.summary(), style="dim")) for a in row))
        return made


async def _run(
    server: Server,
    prompt: Prompt,
    columns: list[list[Answer]],
    options: dorad.GenerateOptions,
    on_text: Any,
) -> None:
    """Streams all columns at the same time, so that they share the server's batches."""

    async def one(client: dorad.aio.Client, column: list[Answer]) -> None:
        start = time.monotonic()
        request: dorad.GenerateOptions = {**options, "adapter": column[0].adapter}
        async with client.stream(prompt.token_ids, **request) as stream:
            async for delta in stream:
                new = column[delta.index].add(delta, time.monotonic() - start)
                on_text(new)
                if all(answer.ended for answer in column):
                    break  # Stop strings end the call early.
        if unfinished := [answer.index for answer in column if not answer.ended]:
            raise dorad.Internal(f"samples {unfinished} never finished", code="INTERNAL")

    async with dorad.aio.Client(**server.arguments()) as client:
        tasks = [asyncio.create_task(one(client, column)) for column in columns]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _print(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _show(columns: list[list[Answer]], run: Any) -> None:
    """Runs and prints: plain text for one answer, a live board or sections for several."""
    answers = [answer for column in columns for answer in column]
    if len(answers) == 1:
        asyncio.run(run(_print))
        _print("\n")
        if sys.stderr.isatty():
            errors().print(f"{answers[0].label()}: {answers[0].summary()}", style="dim")
    elif sys.stdout.isatty():
        with Live(
            Board(columns), console=console(), refresh_per_second=12, vertical_overflow="visible"
        ):
            asyncio.run(run(lambda _: None))
    else:
        asyncio.run(run(lambda _: None))
        for answer in answers:
            print(f"== {answer.label()}: {answer.summary()}\n{answer.text}\n")


def _biases(given: list[str]) -> dict[int, float]:
    """Raises a usage error for what is not ID=NUMBER."""
    biases = {}
    for item in given:
        token, _, bias = item.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError as error:
            raise typer.BadParameter(
                f"{item!r} is not ID=NUMBER", param_hint="--logit-bias"
            ) from error
    return biases


@on_server(admin=False)
def generate(
    server: Server,
    prompt: Annotated[
        str | None, typer.Argument(help='User message. "-" or none: standard input.')
    ] = None,
    model: ModelOption = None,
    token_ids: TokenIdsOption = "",
    adapter: AdapterOption = None,
    base: BaseOption = False,
    system: Annotated[str, typer.Option("--system", help="System message.")] = "",
    raw: Annotated[bool, typer.Option("--raw", help="Plain text: no chat template.")] = False,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            help="Picture before the text: PNG, JPEG or WebP. Needs --model. Repeatable.",
        ),
    ] = None,
    n: Annotated[int, typer.Option("--n", "-n", help="Samples for each adapter.", min=1)] = 1,
    max_tokens: Annotated[
        int, typer.Option(help="Maximum number of tokens of a sample.", min=1)
    ] = 256,
    min_tokens: Annotated[
        int | None, typer.Option(help="Minimum number of tokens of a sample.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely tokens.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample from the most likely tokens with this total probability."),
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Drop tokens below this share of the highest probability.")
    ] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(help="Subtracted from the logit of each generated token.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="The same, times the token's number of occurrences.")
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(help="Divides positive logits of all tokens so far, multiplies others."),
    ] = None,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(help="ID=NUMBER: add a number to a token's logit. May be repeated."),
    ] = None,
    allowed_token_ids: Annotated[str, typer.Option(help="Sample no other tokens: 1,2,3.")] = "",
    bad_words: Annotated[
        list[str] | None,
        typer.Option(help="Token sequence that a sample does not contain: 1,2,3. Repeatable."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed repeats a sample.")] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Text that ends a sample; needs the model's tokenizer. Repeatable."),
    ] = None,
    stop_token_ids: Annotated[str, typer.Option(help="Additional stop tokens: 1,2,3.")] = "",
    stop_sequence: Annotated[
        list[str] | None,
        typer.Option(help="Tokens that together end a sample: 1,2,3. Repeatable."),
    ] = None,
    ngram_drafts: Annotated[
        bool | None,
        typer.Option(
            help="Guess tokens from repetitions. Changes the time alone. Default: the server's."
        ),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Do not stop at end tokens.")
    ] = False,
    logprobs: Annotated[
        Logprobs | None,
        typer.Option(
            help="For JSON output. raw: of the model; processed: after temperature and filters;"
            " scaled: after temperature alone."
        ),
    ] = None,
    prompt_logprobs: Annotated[
        bool,
        typer.Option("--prompt-logprobs", help="For JSON output, also those of the prompt: raw."),
    ] = False,
    truncate_prompt_tokens: Annotated[
        int | None, typer.Option(help="Keep this many tokens at the end of a longer prompt.")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Generate from one prompt with several adapters side by side."""
    ready = read(prompt, token_ids, model, chat=not raw, system=system, pictures=image or ())
    if stop and ready.text is None:
        raise typer.BadParameter("needs --model, for its tokenizer", param_hint="--stop")
    options: dorad.GenerateOptions = {
        "images": ready.images,
        "n": n,
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "repetition_penalty": repetition_penalty,
        "logit_bias": _biases(logit_bias or []),
        "allowed_token_ids": parse_ids(allowed_token_ids, "--allowed-token-ids") or None,
        "bad_words": [parse_ids(word, "--bad-words") for word in bad_words or []],
        "seed": seed,
        "stop_token_ids": parse_ids(stop_token_ids, "--stop-token-ids") or None,
        "stop_sequences": [parse_ids(ids, "--stop-sequence") for ids in stop_sequence or ()],
        "ngram_drafts": ngram_drafts,
        "ignore_eos": ignore_eos,
        "logprobs": logprobs.value if logprobs else None,
        "prompt_logprobs": prompt_logprobs,
        "truncate_prompt_tokens": truncate_prompt_tokens,
    }

    def decoder() -> TextStream | None:
        if ready.text is None:
            return None
        return ready.text.stream(stop=stop or (), min_tokens=min_tokens or 0)

    columns = [
        [Answer(ref, i, decoder=decoder()) for i in range(n)] for ref in adapters_of(adapter, base)
    ]

    def run(on_text: Any) -> Any:
        return _run(server, ready, columns, options, on_text)

    if output is Output.TABLE:  # It is shown while it is generated.
        _show(columns, run)
        return
    asyncio.run(run(lambda _: None))
    output.show([answer.jsonable() for column in columns for answer in column], lambda: None)
