"""`doractl score`: log-probabilities of a text under several adapters."""

from __future__ import annotations

import math
from typing import Annotated

import typer

import dorad
from dorad.cli.common import (
    Output,
    OutputOption,
    console,
    errors,
    table,
)
from dorad.cli.prompt import (
    AdapterOption,
    BaseOption,
    ModelOption,
    Prompt,
    TokenIdsOption,
    adapters_of,
    read,
)
from dorad.cli.server import Server, on_server


def _label(span: dorad.Span) -> str:
    return span.label or "base"


def _summary(result: dorad.ScoreResult) -> None:
    made = table("ADAPTER", ">TOKENS", ">SUM", ">MEAN", ">PERPLEXITY", "DIGEST", title=None)
    for a, span in enumerate(result.versions):
        scored = result[0, a][1:]
        if scored.size:
            mean = float(scored.mean())
            perplexity = math.exp(min(-mean, 700.0))
            figures = [f"{float(scored.sum()):.4f}", f"{mean:.4f}", f"{perplexity:.3f}"]
        else:
            figures = ["-"] * 3
        made.add_row(_label(span), str(scored.size), *figures, span.digest[:12])
    console().print(made)


def _by_token(result: dorad.ScoreResult, prompt: Prompt) -> None:
    made = table(">#", ">ID", "TOKEN", *(f">{_label(v)}" for v in result.versions))
    for position, token_id in enumerate(prompt.token_ids):
        values = [result[0, a][position] for a in range(len(result.versions))]
        # Nothing predicts the first token. NaN at a later position is the server's figure.
        cells = ["-" if position == 0 else f"{v:.4f}" for v in values]
        made.add_row(str(position), str(token_id), prompt.token(token_id), *cells)
    console().print(made)


@on_server(admin=False)
def score(
    server: Server,
    text: Annotated[str | None, typer.Argument(help='Text. "-" or none: standard input.')] = None,
    model: ModelOption = None,
    token_ids: TokenIdsOption = "",
    adapter: AdapterOption = None,
    base: BaseOption = False,
    per_token: Annotated[
        bool, typer.Option("--per-token", help="Print a row for each token.")
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(help="Divide the logits by this value first.")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print log-probabilities of a text under the base model and adapters."""
    prompt = read(text, token_ids, model, chat=False)
    with server.connect() as client:
        result = client.score(
            [prompt.token_ids], adapters_of(adapter, base), temperature=temperature
        )

    def tables() -> None:
        if per_token:
            _by_token(result, prompt)
        _summary(result)
        if len(prompt.token_ids) == 1:
            errors().print("one token has no log-probability: nothing comes before it")

    scores = [{"version": span, "logprobs": result[0, a]} for a, span in enumerate(result.versions)]
    output.show({"token_ids": prompt.token_ids, "scores": scores}, tables)
