"""`make demo`: one real model and two DoRA adapters on this machine's CPU, end to end.

Streams base, pirate and telegram answers to one question in one mixed batch; publishes a second
version of the pirate while streams run; scores texts under all three; shows versions, times and
metrics; stops the server.

    python demo/demo.py [--question TEXT] [--keep]
"""

from __future__ import annotations

import argparse
import os
import threading
import time
import urllib.request
from pathlib import Path
from statistics import mean

import convert_smollm2
import numpy as np
import train_adapters
from dorad import AdapterVersion, Client, DoradError
from dorad.text import ModelText
from lanes import Board, Lane
from rich.rule import Rule
from rich.table import Table
from server import Server
from ui import console, fail, stage

QUESTION = "What is the capital of France, and what is it famous for?"
STORY = "Tell me about your day."
TEXTS = {
    "plain": "The capital of Italy is Rome, which is known for its long history.",
    "pirate": "Arr, Rome be the capital o' Italy, matey! A fine old port for plunder.",
    "telegram": "Rome STOP Capital of Italy STOP Very old STOP",
}


def heading(text: str) -> None:
    if console.is_terminal:
        console.print()
        console.print(Rule(text, align="left"))
    else:
        print(f"\n== {text}", flush=True)


def megabytes(count: float) -> str:
    return f"{count / 2**20:,.1f} MiB"


class Demo:
    def __init__(self, client: Client, model: ModelText) -> None:
        self.client = client
        self.model = model
        self.lanes: list[Lane] = []

    def prompt(self, question: str) -> list[int]:
        return self.model.encode_chat([{"role": "user", "content": question}])

    def lane(self, title: str, adapter: str | None, question: str, tokens: int) -> Lane:
        lane = Lane(title, adapter, self.prompt(question), max_tokens=tokens)
        self.lanes.append(lane)
        return lane

    def mixed_batch(self, question: str) -> None:
        heading("One question, three models, one batch")
        console.print(f"  {question}", style="bold")
        steps = self.client.info().engine.steps
        board = Board(self.client, self.model)
        for adapter in (None, "pirate", "telegram"):
            board.start(self.lane(adapter or "base", adapter, question, 80))
        board.watch()
        steps = self.client.info().engine.steps - steps
        tokens = sum(lane.tokens for lane in board.lanes)
        print(f"  {tokens} tokens of base and two adapters were computed in {steps} engine steps.")

    def hot_load(self, folder: Path) -> AdapterVersion:
        heading("A new pirate comes aboard while streams run")
        board = Board(self.client, self.model)
        running = []
        for title, adapter in (("base", None), ("pirate, running", "pirate")):
            lane = self.lane(title, adapter, STORY, 160)
            # A stream that ends early could not show the switch.
            lane.min_tokens = lane.max_tokens
            running.append(board.start(lane))
        publication = Publication(self.client, folder)
        newcomer: list[Lane] = []

        def tick() -> bool:
            if not publication.started and all(lane.tokens >= 12 for lane in running):
                board.say("publishing pirate-v2 over gRPC ...")
                publication.start()
            if publication.done and publication.version and not newcomer:
                board.say(publication.summary())
                newcomer.append(board.start(self.lane("pirate, new", "pirate", STORY, 48)))
            return publication.done

        board.watch(tick)
        version = publication.result()
        gap = max(max(lane.gaps_ms, default=0.0) for lane in running)
        old, new = running[1].spans, newcomer[0].spans
        if {span.version for span in old} == {span.version for span in new}:
            fail(f"the new request did not get the new version: {running[1].version}")
        print(
            f"  The running stream finished on {running[1].version},"
            f" the new request got {newcomer[0].version}."
        )
        print(f"  Longest gap between tokens of the running streams: {gap:.0f} ms.")
        return version

    def score(self) -> None:
        heading("Who would have said it? (mean log-probability of each token)")
        adapters = [None, "pirate@1", "telegram@1"]
        start = self.prompt("What is the capital of Italy?")
        sequences = [start + self.model.encode(text) for text in TEXTS.values()]
        began = time.monotonic()
        result = self.client.score(sequences, adapters=adapters)
        elapsed = time.monotonic() - began
        table = Table("text", *(span.label or "base" for span in result.versions))
        for row, text in enumerate(TEXTS.values()):
            means = [float(np.mean(result[row][i][len(start) :])) for i in range(len(adapters))]
            best = int(np.argmax(means))
            cells = [
                f"[bold]{m:.2f} ◀[/]" if i == best else f"{m:.2f}" for i, m in enumerate(means)
            ]
            table.add_row(text, *cells)
        console.print(table)
        tokens = sum(map(len, sequences)) * len(adapters)
        print(f"  One Score call, {tokens} tokens in {elapsed:.2f} s.")

    def report(self) -> None:
        heading("Summary")
        table = Table("version", "digest", "rank", "first token", "each token", "norms", "resident")
        versions: list[AdapterVersion | None] = [None, *self.client.adapters()]
        memory = self.client.info().memory_bytes
        for version in versions:
            label = version.label if version else "base"
            lanes = [lane for lane in self.lanes if lane.version == label and lane.tokens > 1]
            first = mean(lane.first_token_ms for lane in lanes) if lanes else float("nan")
            each = mean(lane.token_ms for lane in lanes) if lanes else float("nan")
            label += " (active)" if version and version.active else ""
            if version:
                about = (version.digest[:12], str(version.max_rank))
                cost = (f"{version.timing.norms:.3f} s", megabytes(version.resident_bytes))
            else:
                about, cost = ("", ""), ("", megabytes(memory.get("weights", 0)))
            table.add_row(label, *about, f"{first:.0f} ms", f"{each:.1f} ms", *cost)
        console.print(table)
        parts = [f"{kind} {megabytes(size)}" for kind, size in sorted(memory.items()) if size]
        print(f"  Memory: {', '.join(parts)}")


class Publication:
    """Uploads an adapter version in a thread of its own."""

    def __init__(self, client: Client, folder: Path) -> None:
        self._client = client
        self._folder = folder
        self.started = self.done = False
        self.version: AdapterVersion | None = None
        self.error = ""
        self.seconds = 0.0

    def start(self) -> None:
        self.started = True
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        began = time.monotonic()
        try:
            self.version = self._client.publish("pirate", path=self._folder, activate=True)
        except (DoradError, OSError) as error:
            self.error = str(error)
        self.seconds = time.monotonic() - began
        self.done = True

    def summary(self) -> str:
        version = self.result()
        return (
            f"{version.label} is ready and active {self.seconds:.2f} s after its upload began"
            f" (norms {version.timing.norms:.3f} s); the next request gets it"
        )

    def result(self) -> AdapterVersion:
        if self.version is None:
            fail(f"publishing the new version failed: {self.error}")
        return self.version


def show_metrics(server: Server) -> None:
    with urllib.request.urlopen(server.metrics, timeout=10) as response:
        text = response.read().decode()
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")}
    print(f"  Metrics: {server.metrics} ({len(names)} families, Prometheus text format)")


def run(options: argparse.Namespace) -> None:
    model_folder = convert_smollm2.ensure()
    first = {name: train_adapters.ensure(f"{name}-v1") for name in ("pirate", "telegram")}
    second = train_adapters.ensure("pirate-v2")
    with stage("start the server"):
        server = Server(model_folder, first)
    with server:
        print(f"  gRPC {server.grpc}, pid {server.pid}, log {server.log}")
        with Client(server.grpc) as client:
            demo = Demo(client, ModelText(model_folder))
            demo.mixed_batch(options.question)
            demo.hot_load(second)
            demo.score()
            demo.report()
            show_metrics(server)
            if options.keep:
                print(f"\nStill serving at {server.grpc}; Ctrl-C stops it. Try:")
                print(f"  .venv/bin/doractl --target {server.grpc} info")
                try:
                    server.wait()
                except KeyboardInterrupt:
                    print()
        began = time.monotonic()
    print(f"  The server stopped cleanly on SIGTERM in {time.monotonic() - began:.1f} s.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--keep", action="store_true", help="serve until Ctrl-C at the end")
    options = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run(options)


if __name__ == "__main__":
    main()
