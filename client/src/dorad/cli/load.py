"""The command line of `dorad-load`."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dorad import load
from dorad._channel import DEFAULT_TARGET
from dorad.cli.common import (
    Command,
    Output,
    OutputOption,
    TargetOption,
    TimeoutOption,
    console,
    errors,
    print_json,
    table,
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _print(report: dict[str, Any]) -> None:
    made = table("MILLISECONDS", ">MEAN", ">P50", ">P90", ">P95", ">P99", ">MAX")
    names = {
        "ttft_ms": "first token",
        "itl_ms": "between tokens",
        "longest_gap_ms": "longest gap of a request",
        "e2e_ms": "end to end",
    }
    for key, name in names.items():
        if row := report[key]:
            made.add_row(
                name, *(f"{row[k]:.1f}" for k in ("mean", "p50", "p90", "p95", "p99", "max"))
            )
    out = console()
    out.print(made)
    out.print(
        f"{report['requests']} requests in {report['seconds']:.1f} s ({report['loop']} loop), "
        f"{report['failed']} failed: {report['requests_per_second']:.2f} requests/s, "
        f"{report['generated_tokens_per_second']:.1f} generated and "
        f"{report['prompt_tokens_per_second']:.1f} prompt tokens/s"
    )
    for reason, count in report["errors"].items():
        out.print(f"  {count} x {reason}")


def _plan(
    rate: float | None, concurrency: int | None, requests: int | None, duration: float | None
) -> dict[str, Any]:
    """The loop's four settings. Without any: 8 in flight for 10 seconds."""
    if rate is not None and concurrency is not None:
        raise typer.BadParameter("give --rate or --concurrency, not both", param_hint="--rate")
    if rate is None and concurrency is None:
        concurrency = 8
    if requests is None and duration is None:
        duration = 10.0
    return {
        "rate": rate,
        "concurrency": concurrency,
        "requests": requests,
        "duration": duration,
    }


@app.command(cls=Command)
def main(
    rate: Annotated[
        float | None, typer.Option(help="Open loop: requests a second (Poisson).", min=0.001)
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", "-c", help="Closed loop: in flight.", min=1)
    ] = None,
    requests: Annotated[int | None, typer.Option(help="Stop after so many.", min=1)] = None,
    duration: Annotated[
        float | None, typer.Option("--duration", "-d", help="Send for so many seconds.", min=0.1)
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option("--adapter", "-a", help='"name", "name@version" or "base", with "=WEIGHT".'),
    ] = None,
    zipf: Annotated[
        float | None, typer.Option(help="Popularity by order: the i-th adapter weighs i^-ZIPF.")
    ] = None,
    prompt_tokens: Annotated[
        str, typer.Option(help="128, 32:256 or lognormal:MEAN:SIGMA[:CAP].")
    ] = "128",
    output_tokens: Annotated[str, typer.Option(help="As --prompt-tokens.")] = "64",
    shared_prefix: Annotated[
        int, typer.Option(help="Leading tokens all prompts have in common.", min=0)
    ] = 0,
    n: Annotated[int, typer.Option("--n", help="Samples of each prompt.", min=1)] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0)] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed draws the same requests.")] = 0,
    connections: Annotated[int, typer.Option(help="TCP connections to use.", min=1)] = 1,
    target: TargetOption = DEFAULT_TARGET,
    output: OutputOption = Output.TABLE,
    timeout: TimeoutOption = 600.0,
) -> None:
    """Drive a server with many requests; report latencies and throughput.

    Exit code 1 when every request failed.
    """
    plan = load.Plan(
        prompt=load.Lengths.parse(prompt_tokens),
        output=load.Lengths.parse(output_tokens),
        popularity=load.Popularity.parse(adapter or [], zipf),
        n=n,
        shared_prefix=shared_prefix,
        temperature=temperature,
        seed=seed,
        **_plan(rate, concurrency, requests, duration),
    )
    bar = Progress(
        TextColumn("{task.completed} sent"),
        BarColumn(),
        TimeElapsedColumn(),
        console=errors(),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task("load", total=requests)

        def show(records: list[load.Record]) -> None:
            bar.update(task, completed=len(records))

        report = asyncio.run(
            load.run(
                target,
                plan,
                timeout=timeout,
                connections=connections,
                progress=None if bar.disable else show,
            )
        )
    if output is Output.JSON:
        print_json(report)
    else:
        _print(report)
    if report["failed"] == report["requests"]:
        raise typer.Exit(1)
