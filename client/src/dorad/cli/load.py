"""The command line of `dorad-load`."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.live import Live
from rich.table import Table

from dorad import load
from dorad.cli.common import (
    Command,
    Output,
    OutputOption,
    VersionOption,
    console,
    errors,
    table,
)
from dorad.cli.server import Server, on_server
from dorad.load.chart import COLUMNS, load_of

app = typer.Typer(pretty_exceptions_enable=False)


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
    refused = report["refused"]
    out.print(
        f"{report['requests']} requests in {report['seconds']:.1f} s ({report['loop']} loop), "
        f"{refused['requests']} refused, {report['failed']} failed: "
        f"{report['requests_per_second']:.2f} requests/s, "
        f"{report['generated_tokens_per_second']:.1f} generated and "
        f"{report['prompt_tokens_per_second']:.1f} prompt tokens/s"
    )
    if drain := report["drain_seconds"]:
        out.print(f"  rates exclude the last {drain:.1f} s, in which nothing was sent")
    for reason, count in report["errors"].items():
        out.print(f"  {count} x {reason}")
    for reason, count in refused["reasons"].items():
        out.print(f"  {count} x {reason}, refused after {_milliseconds(refused['latency_ms'])}")
    if hints := refused["retry_after_ms"]:
        out.print(f"  retry hint {_milliseconds(hints)}")
    if goodput := report["goodput"]:
        out.print(
            f"{goodput['share']:.1%} met all goals: {goodput['requests_per_second']:.2f} requests/s"
        )
    generator = report["generator"]
    out.print(
        f"generator: {generator['processes']} process(es), busy {generator['cpu_share']:.0%}, "
        f"event loop lag {_milliseconds(generator['loop_lag_ms'])}"
    )
    if generator["bottleneck"]:
        out.print(f"  THE GENERATOR WAS THE BOTTLENECK: {'; '.join(generator['why'])}.")
        out.print("  The figures show its limits, not the server's. Try more --processes.")


def _milliseconds(row: dict[str, float] | None) -> str:
    return "-" if row is None else f"{row['p50']:.1f} ms (p99 {row['p99']:.1f})"


class _View:
    """A live progress line. Rates count from the previous update."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._before, self._at = load.Counts(), self._began
        self.live = Live(
            self._table(load.Counts(), self._began),
            console=errors(),
            transient=True,
            auto_refresh=False,
        )

    def show(self, counts: load.Counts) -> None:
        now = time.monotonic()
        if now - self._at < 0.25:  # Several processes report.
            return
        self.live.update(self._table(counts, now), refresh=True)
        self._before, self._at = counts, now

    def _table(self, counts: load.Counts, now: float) -> Table:
        before, span = self._before, max(1e-9, now - self._at)
        fresh = counts.first_tokens - before.first_tokens
        ttft = counts.first_token_seconds - before.first_token_seconds
        row = {
            ">SECONDS": f"{now - self._began:.0f}",
            ">SENT": str(counts.sent),
            ">IN FLIGHT": str(counts.in_flight),
            ">DONE/S": f"{(counts.done - before.done) / span:.1f}",
            ">TOKENS/S": f"{(counts.tokens - before.tokens) / span:.0f}",
            ">FIRST TOKEN": f"{ttft / fresh * 1000:.0f} ms" if fresh else "-",
            ">REFUSED": str(counts.refused),
            ">FAILED": str(counts.failed),
            ">OWN CPU": f"{(counts.cpu_seconds - before.cpu_seconds) / span:.0%}",
        }
        made = table(*row)
        made.add_row(*row.values())
        return made


def _loads(rate: str, concurrency: str) -> list[dict[str, Any]]:
    """The loop of each run. Default: 8 requests in flight."""
    if rate and concurrency:
        raise typer.BadParameter("give --rate or --concurrency, not both", param_hint="--rate")
    if rate:
        return [{"rate": value} for value in _list(rate, float, "--rate")]
    return [{"concurrency": value} for value in _list(concurrency or "8", int, "--concurrency")]


def _list(text: str, kind: type[float] | type[int], option: str) -> list[float]:
    """Rising positive numbers, separated by commas."""
    try:
        values = [kind(word) for word in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) <= 0 or values != sorted(set(values)):
        raise typer.BadParameter(
            f"{text!r} is not a number above 0, or several rising ones: 1,2,4", param_hint=option
        )
    return values


def _seed(seed: int, step: int) -> int:
    """Each run of a sweep has prompts of its own: the prefix cache knows none of them."""
    return seed + (step << 48)


def _samples(data: Path | None, model: Path | None) -> tuple[load.Sample, ...]:
    if data is None:
        return ()
    text = None
    if model is not None:
        from dorad.text import ModelText  # Slow to import, and needs an extra.

        text = ModelText(model)
    return load.read_samples(data, text)


def _vocabulary(model: Path | None) -> load.Vocabulary:
    """Of the model's config.json."""
    if model is None:
        raise typer.BadParameter(
            "random prompts for OpenAI's API need the model's vocabulary; or give --data",
            param_hint="--model / DORAD_MODEL",
        )
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config = config | (config.get("text_config") or {})
    ends = config.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    return load.Vocabulary(int(config["vocab_size"]), frozenset(ends))


def _print_sweep(reports: list[dict[str, Any]]) -> None:
    name = "REQUESTS/S OFFERED" if reports[0]["loop"] == "open" else "IN FLIGHT"
    made = table(f">{name}", *(f">{column.upper()}" for column in COLUMNS), "")
    for report in reports:
        note = "generator-bound" if report["generator"]["bottleneck"] else ""
        made.add_row(f"{load_of(report):g}", *(cell(report) for cell in COLUMNS.values()), note)
    console().print(made)
    console().print("times in milliseconds")


@app.command(cls=Command)
@on_server(retries=False)
def main(
    server: Server,
    rate: Annotated[
        str,
        typer.Option(help="Open loop: requests per second (Poisson). 1,2,4: a run for each."),
    ] = "",
    concurrency: Annotated[
        str,
        typer.Option(
            "--concurrency",
            "-c",
            help="Closed loop: requests in flight. 1,2,4: a run for each.  [default: 8]",
            show_default=False,
        ),
    ] = "",
    requests: Annotated[
        int | None, typer.Option(help="Stop after this many requests.", min=1)
    ] = None,
    duration: Annotated[
        float | None, typer.Option("--duration", "-d", help="Send for this many seconds.", min=0.1)
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option("--adapter", "-a", help='"name", "name@version" or "base", with "=WEIGHT".'),
    ] = None,
    zipf: Annotated[
        float | None, typer.Option(help="Zipf popularity: the i-th adapter has weight i^-ZIPF.")
    ] = None,
    prompt_tokens: Annotated[
        str,
        typer.Option(
            help="Prompt length: 128, 32:256 or lognormal:MEAN:SIGMA[:CAP].  [default: 128]",
            show_default=False,
        ),
    ] = "",
    output_tokens: Annotated[
        str, typer.Option(help="Output length, in the form of --prompt-tokens.")
    ] = "64",
    shared_prefix: Annotated[
        int, typer.Option(help="Number of leading tokens that all prompts share.", min=0)
    ] = 0,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Prompts instead of random ones: JSON lines with token_ids, prompt or messages."
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            "-m",
            envvar="DORAD_MODEL",
            help="Model folder: the tokenizer of --data's texts, the vocabulary of --openai.",
        ),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option(help="Whether every answer gets its whole length.")
    ] = True,
    n: Annotated[int, typer.Option("--n", help="Samples of each prompt.", min=1)] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0)] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed repeats the requests.")] = 0,
    warmup: Annotated[
        float, typer.Option(help="Seconds of load before the measurement.", min=0)
    ] = 0.0,
    goal_ttft: Annotated[
        float | None, typer.Option(help="Goodput goal: milliseconds to the first token.", min=0)
    ] = None,
    goal_itl: Annotated[
        float | None, typer.Option(help="Goodput goal: mean milliseconds between tokens.", min=0)
    ] = None,
    goal_e2e: Annotated[
        float | None, typer.Option(help="Goodput goal: milliseconds of a whole request.", min=0)
    ] = None,
    processes: Annotated[
        int, typer.Option(help="Processes that share the load. Each uses one core.", min=1)
    ] = 1,
    connections: Annotated[int, typer.Option(help="TCP connections of each process.", min=1)] = 1,
    openai: Annotated[
        str,
        typer.Option(help="Send to OpenAI's API at this URL (the gateway's), not to --target."),
    ] = "",
    html: Annotated[
        Path | None, typer.Option(help="Also write a page with charts to this file.")
    ] = None,
    output: OutputOption = Output.TABLE,
    version: VersionOption = False,
) -> None:
    """Send many requests to a server and report latencies and throughput.

    The exit code is 1 if no request succeeded.
    """
    if html is not None and not html.absolute().parent.is_dir():  # Not after a long run.
        raise FileNotFoundError(f"no folder {html.absolute().parent}")
    if data is not None and (prompt_tokens or shared_prefix):
        raise typer.BadParameter("has prompts of its own lengths", param_hint="--data")
    loads = _loads(rate, concurrency)
    plan = load.Plan(
        prompt=load.Lengths.parse(prompt_tokens or "128"),
        output=load.Lengths.parse(output_tokens),
        popularity=load.Popularity.parse(adapter or [], zipf),
        n=n,
        shared_prefix=shared_prefix,
        temperature=temperature,
        seed=seed,
        warmup=warmup,
        goals=load.Goals(*(g and g / 1000 for g in (goal_ttft, goal_itl, goal_e2e))),
        requests=requests,
        duration=10.0 if requests is None and duration is None else duration,
        samples=_samples(data, model),
        ignore_eos=ignore_eos,
        **loads[0],
    )
    where: load.Target
    if openai:
        where = load.OpenAI(openai, load.Vocabulary(0), server.timeout)
        if not plan.samples:
            where = dataclasses.replace(where, words=_vocabulary(model))
    else:
        where = load.Grpc(server.target, server.admin_target or None, server.timeout)

    reports: list[dict[str, Any]] = []
    for step, changes in enumerate(loads):
        now = dataclasses.replace(plan, seed=_seed(seed, step), **changes)
        reports.append(_run(where, now, processes, connections))
        if html is not None:  # After each run, so that an interrupted sweep leaves a page.
            html.write_text(load.page(reports), encoding="utf-8")
    if len(reports) == 1:
        output.show(reports[0], lambda: _print(reports[0]))
    else:
        output.show(reports, lambda: _print_sweep(reports))
    if all(r["failed"] + r["refused"]["requests"] == r["requests"] for r in reports):
        raise typer.Exit(1)


def _run(where: load.Target, plan: load.Plan, processes: int, connections: int) -> dict[str, Any]:
    def run(show: load.Show | None) -> dict[str, Any]:
        return load.run_processes(where, plan, processes, connections=connections, show=show)

    if not sys.stderr.isatty():
        return run(None)
    view = _View()
    with view.live:
        return run(view.show)
