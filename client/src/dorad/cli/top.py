"""`doractl top`: a live view of the server."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

import dorad
from dorad._channel import PROBE_SECONDS
from dorad.cli.adapters import versions_table
from dorad.cli.common import (
    Output,
    OutputOption,
    console,
    size,
)
from dorad.cli.completion import LIVE_STATES
from dorad.cli.operate import duration
from dorad.cli.server import Server, on_server

_STEPS = "steps"  # From GetInfo, so that this rate needs no --metrics.
_RATES = {
    "steps/s": _STEPS,
    "generated tokens/s": "dorad_generated_tokens_total",
    "prompt tokens/s": "dorad_prompt_tokens_total",
    "scored tokens/s": "dorad_scored_tokens_total",
    "requests/s": "dorad_requests_ended_total",
}
_MEANS = {
    "first token ms": "dorad_time_to_first_token_seconds",
    "inter-token ms": "dorad_inter_token_latency_seconds",
    "step ms": "dorad_engine_step_seconds",
}


def parse_metrics(text: str) -> dict[str, float]:
    """Parses Prometheus text. Returns the sum over labels for each sample name, without buckets."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        name = line.split("{", 1)[0].split(" ", 1)[0]
        if name.endswith("_bucket"):
            continue
        # Label values may contain spaces. The value, and a timestamp, follow the last "}".
        rest = line.rsplit("}", 1)[-1] if "{" in line else line[len(name) :]
        try:
            sums[name] = sums.get(name, 0.0) + float(rest.split()[0])
        except (ValueError, IndexError):
            continue
    return sums


def fetch_metrics(url: str) -> dict[str, float]:
    """The server's metrics. Raises OSError when they cannot be fetched."""
    if not url.startswith(("http://", "https://")):
        raise typer.BadParameter(f"{url!r} is not an http URL", param_hint="--metrics")
    with urllib.request.urlopen(url, timeout=5) as answer:
        return parse_metrics(answer.read().decode("utf-8", "replace"))


class Rates:
    """Computes rates from counters."""

    def __init__(self) -> None:
        self._last: dict[str, float] | None = None
        self._at = 0.0

    def update(self, counters: dict[str, float], at: float) -> dict[str, float]:
        """Rates per second and means in milliseconds since the last call. Empty at first."""
        last, seconds = self._last, at - self._at
        self._last, self._at = counters, at
        if last is None or seconds <= 0:
            return {}

        def moved(name: str) -> float:
            # The difference is negative after a restart of the server.
            return max(0.0, counters.get(name, 0.0) - last.get(name, 0.0))

        found = {label: moved(name) / seconds for label, name in _RATES.items() if name in counters}
        for label, name in _MEANS.items():
            if (count := moved(f"{name}_count")) > 0:
                found[label] = moved(f"{name}_sum") / count * 1000
        return found


def _bar(used: int, total: int) -> RenderableType:
    row = Table.grid(padding=(0, 1))
    share = used / total if total else 0.0
    row.add_row(ProgressBar(total=max(total, 1), completed=used, width=30), f"{share:.0%}")
    return row


def render(
    info: dorad.ServerInfo, versions: Iterable[dorad.AdapterVersion], rates: dict[str, float]
) -> RenderableType:
    """One frame."""
    engine = info.engine
    state = ("paused", "yellow") if engine.paused else ("running", "green")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    grid.add_row("sequences", f"{engine.running_sequences} running")
    grid.add_row("queue", f"{engine.queued_requests} requests")
    grid.add_row("KV pages", _bar(engine.kv_pages_used, engine.kv_pages_total))
    grid.add_row(
        "memory", ", ".join(f"{k} {size(v)}" for k, v in sorted(info.memory_bytes.items()))
    )
    for label, value in rates.items():
        grid.add_row(label, f"{value:,.1f}")
    head = Text.assemble(
        (f"dorad {info.version}", "bold"),
        f"  {info.model.name} on {info.device}  ",
        state,
        f"  up {duration(info.uptime)}  generation {info.generation}",
    )
    return Group(head, Text(), grid, Text(), versions_table(list(versions)))


class _Limits(TypedDict, total=False):
    timeout: float
    retry_for: float


@dataclass(frozen=True)
class _Look:
    """The state of the server at one time."""

    info: dorad.ServerInfo
    adapters: list[dorad.AdapterVersion]
    rates: dict[str, float]

    def render(self) -> RenderableType:
        return render(self.info, self.adapters, self.rates)


def _may_return(error: Exception) -> bool:
    """Whether the server may answer the next look: it restarts, or hangs."""
    if isinstance(error, dorad.DoradError):
        return error.retryable or isinstance(error, dorad.DeadlineExceeded)
    return True  # Its metrics were not reached.


@on_server()
def top(
    server: Server,
    metrics: Annotated[
        str,
        typer.Option(
            "--metrics", envvar="DORAD_METRICS", help="URL of the server's /metrics, for rates."
        ),
    ] = "",
    interval: Annotated[float, typer.Option(help="Seconds between updates.", min=0.1)] = 1.0,
    count: Annotated[int, typer.Option(help="Stop after this many updates. 0: never.", min=0)] = 0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show queue, throughput, KV cache and adapters live. Ctrl-C ends it.

    It goes on while the server restarts. A server that never answered ends it.
    """
    rates = Rates()
    timeout = min(server.timeout, PROBE_SECONDS)

    def look(client: dorad.Client, first: bool) -> _Look:
        # Later looks show a failure at once, and the next look is their retry.
        limits: _Limits = {} if first else {"timeout": timeout, "retry_for": 0}
        info, versions = client.info(**limits), client.adapters(**limits)
        counters = {_STEPS: float(info.engine.steps)}
        counters |= fetch_metrics(metrics) if metrics else {}
        held = [version for version in versions if version.state in LIVE_STATES]
        return _Look(info, held, rates.update(counters, time.monotonic()))

    screen = output is Output.TABLE and sys.stdout.isatty()
    live = Live(console=console(), screen=True, auto_refresh=False) if screen else None

    def show(value: dict[str, Any], view: RenderableType) -> None:
        if live is None:
            output.show_event(value, lambda: console().print(view))
        else:
            live.update(view, refresh=True)

    seen: _Look | None = None
    with server.connect() as client, live or contextlib.nullcontext():
        for number in itertools.count(1):
            try:
                seen = look(client, seen is None)
                value = {"info": seen.info, "adapters": seen.adapters, "rates": seen.rates}
                view = seen.render()
            except (dorad.DoradError, OSError) as error:
                if seen is None or not _may_return(error):
                    raise
                value = {"unreachable": str(error)}
                note = Text(f"unreachable, retrying: {error}", style="bold red")
                view = Group(note, Text(), seen.render()) if live else note
            show(value, view)
            if number == count:
                break
            time.sleep(interval)
