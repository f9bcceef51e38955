"""The command line of `dorad-load`."""

from __future__ import annotations

import sys
import time
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


def _plan(
    rate: float | None, concurrency: int | None, requests: int | None, duration: float | None
) -> dict[str, Any]:
    """Settings of the loop. Default: 8 requests in flight for 10 seconds."""
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
@on_server(retries=False)
def main(
    server: Server,
    rate: Annotated[
        float | None, typer.Option(help="Open loop: requests per second (Poisson).", min=0.001)
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option("--concurrency", "-c", help="Closed loop: requests in flight.", min=1),
    ] = None,
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
        str, typer.Option(help="Prompt length: 128, 32:256 or lognormal:MEAN:SIGMA[:CAP].")
    ] = "128",
    output_tokens: Annotated[
        str, typer.Option(help="Output length, in the form of --prompt-tokens.")
    ] = "64",
    shared_prefix: Annotated[
        int, typer.Option(help="Number of leading tokens that all prompts share.", min=0)
    ] = 0,
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
    output: OutputOption = Output.TABLE,
    version: VersionOption = False,
) -> None:
    """Send many requests to a server and report latencies and throughput.

    The exit code is 1 if no request succeeded.
    """
    plan = load.Plan(
        prompt=load.Lengths.parse(prompt_tokens),
        output=load.Lengths.parse(output_tokens),
        popularity=load.Popularity.parse(adapter or [], zipf),
        n=n,
        shared_prefix=shared_prefix,
        temperature=temperature,
        seed=seed,
        warmup=warmup,
        goals=load.Goals(*(g and g / 1000 for g in (goal_ttft, goal_itl, goal_e2e))),
        **_plan(rate, concurrency, requests, duration),
    )

    def run(show: load.Show | None) -> dict[str, Any]:
        return load.run_processes(
            server.target,
            plan,
            processes,
            admin_target=server.admin_target or None,
            timeout=server.timeout,
            connections=connections,
            show=show,
        )

    if sys.stderr.isatty():
        view = _View()
        with view.live:
            report = run(view.show)
    else:
        report = run(None)
    output.show(report, lambda: _print(report))
    if report["failed"] + report["refused"]["requests"] == report["requests"]:
        raise typer.Exit(1)
