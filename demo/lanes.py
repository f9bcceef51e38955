"""Streams of the demo, side by side: each lane is one request and its text so far."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dorad import Client, DoradError, Span
from dorad.text import ModelText
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from ui import console, fail

COLORS = {"": "cyan", "pirate": "yellow", "telegram": "magenta"}


@dataclass
class Lane:
    """One request. Its thread writes, the display reads; every field is replaced as a whole."""

    title: str
    adapter: str | None
    prompt: list[int]
    max_tokens: int = 96
    min_tokens: int = 0
    seed: int = 1

    text: str = ""
    tokens: int = 0
    started: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    done: bool = False
    error: str = ""

    @property
    def first_token_ms(self) -> float:
        return (self.arrivals[0] - self.started) * 1e3 if self.arrivals else float("nan")

    @property
    def gaps_ms(self) -> list[float]:
        return [(b - a) * 1e3 for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def token_ms(self) -> float:
        """Mean time between tokens; a message may carry several."""
        if self.tokens < 2 or len(self.arrivals) < 2:
            return float("nan")
        return (self.arrivals[-1] - self.arrivals[0]) * 1e3 / (self.tokens - 1)

    @property
    def version(self) -> str:
        """The versions that produced the tokens, as the server stamped them."""
        return " → ".join(dict.fromkeys(span.label or "base" for span in self.spans))

    @property
    def heading(self) -> str:
        """The title, and the version unless one of them says it all."""
        if self.version.split("@")[0] == self.title:
            return self.version
        return f"{self.title}: {self.version}" if self.version else self.title

    def run(self, client: Client, model: ModelText) -> None:
        self.started = time.monotonic()
        decoder = model.stream()
        try:
            with client.stream(
                self.prompt,
                adapter=self.adapter,
                temperature=0.6,
                top_p=0.9,
                seed=self.seed,
                max_tokens=self.max_tokens,
                min_tokens=self.min_tokens,
            ) as deltas:
                for delta in deltas:
                    if len(delta.token_ids):
                        self.arrivals = [*self.arrivals, time.monotonic()]
                        self.tokens += len(delta.token_ids)
                        self.text += decoder.push(delta.token_ids)
                    self.spans = [*self.spans, *delta.spans]
            self.text += decoder.finish()
        except DoradError as error:
            self.error = str(error)
        self.done = True

    def panel(self) -> Panel:
        color = COLORS.get((self.adapter or "").split("@")[0], "green")
        foot = f"{self.tokens} tokens"
        if self.tokens > 1:
            foot = f"{foot} · {self.first_token_ms:.0f} + {self.token_ms:.0f} ms each"
        body = Text(self.error or self.text.strip() + ("" if self.done else "▌"))
        return Panel(body, title=self.heading, subtitle=foot, border_style=color)

    def print_plain(self) -> None:
        print(f"  {self.heading:<28}| {' '.join(self.text.split())}", flush=True)
        print(
            f"  {'':<28}| {self.tokens} tokens, first after {self.first_token_ms:.0f} ms,"
            f" then {self.token_ms:.0f} ms each",
            flush=True,
        )


def side_by_side(lanes: Sequence[Lane], note: str = "") -> RenderableType:
    grid = Table.grid(expand=True, padding=(0, 1))
    for _ in lanes:
        grid.add_column(ratio=1)
    grid.add_row(*(lane.panel() for lane in lanes))
    return Group(grid, Text(note, style="dim")) if note else grid


class Board:
    """Runs lanes in threads and shows them: live columns on a terminal, otherwise lines."""

    def __init__(self, client: Client, model: ModelText) -> None:
        self._client = client
        self._model = model
        self.lanes: list[Lane] = []
        self.note = ""
        self._printed: set[int] = set()

    def start(self, lane: Lane) -> Lane:
        self.lanes.append(lane)
        arguments = (self._client, self._model)
        threading.Thread(target=lane.run, args=arguments, daemon=True).start()
        return lane

    def say(self, note: str) -> None:
        """The current activity, below the columns (or on its own line)."""
        self.note = note
        if not console.is_terminal:
            print(f"  {note}", flush=True)

    def watch(self, tick: Callable[[], bool] | None = None) -> None:
        """Shows the lanes until all are done and tick (called now and then) returns True."""
        if console.is_terminal:
            with Live(console=console, refresh_per_second=12) as live:
                while self._busy(tick):
                    live.update(side_by_side(self.lanes, self.note))
                    time.sleep(0.05)
                live.update(side_by_side(self.lanes, self.note))
        else:
            while self._busy(tick):
                self._print_done()
                time.sleep(0.02)
            self._print_done()
        for lane in self.lanes:
            if lane.error:
                fail(f"the stream of {lane.title} failed: {lane.error}")

    def _busy(self, tick: Callable[[], bool] | None) -> bool:
        finished = tick is None or tick()
        return not (finished and all(lane.done for lane in self.lanes))

    def _print_done(self) -> None:
        for index, lane in enumerate(self.lanes):
            if lane.done and index not in self._printed:
                self._printed.add(index)
                if not lane.error:
                    lane.print_plain()
