"""Two trees of this project on the CPU, in turns, in one run: is the second as fast as the first?

Both trees are built (`dorad` and `ops_bench`). Each serves SmolLM2 with its own client, and the
work is that of cpu_peers.py without the peers; then `ops_bench` of both takes turns. Two figures:
the median over the turns of now / before, and the ratio of the least times, which other work on
the machine disturbs less.

    python tests/bench/cpu_trees.py BEFORE [--repeats N] [--json FILE]
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
WORK = [(name, batch) for batch in (1, 16) for name in ("base", "dora")]
Times = dict[str, list[float]]


def serve_work(tree: Path, model: Path, dtype: str) -> None:
    """The child: runs in one tree, does the work that its input names, prints the seconds."""
    sys.path[:0] = [str(tree / "tests" / "bench"), str(tree / "tests"), str(tree / "client/src")]
    import cpu_peers as work

    with tempfile.TemporaryDirectory(prefix="dorad-bench-") as scratch:
        bench = work.Bench(model, Path(scratch), 1, Console(file=sys.stderr))
        bench.make_adapters(["r16-0"])
        settings = {"model.compute_dtype": dtype, "engine.threads": work.THREADS}
        with work.serve(model, bench.folders, settings, timeout=120) as server:
            print("ready", flush=True)
            for line in sys.stdin:
                name, batch = line.split()
                names = ["" if name == "base" else "r16-0"] * int(batch)
                print(work.dorad_run(server, names), flush=True)


class Tree:
    """One tree's server, in a process of its own."""

    def __init__(self, tree: Path, model: Path, dtype: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--child", tree, "--model", model, "--dtype", dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "DORAD_BINARY": str(tree / "build" / "dorad")},
        )
        if self.answer() != "ready":
            sys.exit(f"{tree} does not serve")

    def answer(self) -> str:
        return self.process.stdout.readline().strip()

    def run(self, name: str, batch: int) -> float:
        self.process.stdin.write(f"{name} {batch}\n")
        self.process.stdin.flush()
        return float(self.answer())

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait(60)


def served(trees: dict[str, Path], model: Path, dtype: str, repeats: int) -> dict[str, Times]:
    """Seconds by work and tree; the order of the trees changes from turn to turn."""
    running = {name: Tree(path, model, dtype) for name, path in trees.items()}
    times: dict[str, Times] = {}
    try:
        for name, batch in WORK:
            key = f"{dtype} {name}, batch {batch}"
            times[key] = {tree: [] for tree in running}
            for turn in range(repeats + 1):
                order = list(running)[:: 1 if turn % 2 else -1]
                for tree in order:
                    seconds = running[tree].run(name, batch)
                    if turn:  # The first warms up.
                        times[key][tree].append(seconds)
    finally:
        for tree in running.values():
            tree.end()
    return times


def linears(trees: dict[str, Path], repeats: int) -> dict[str, Times]:
    times: dict[str, Times] = {}
    for _ in range(repeats):
        for name, tree in trees.items():
            command = [tree / "build" / "tests" / "bench" / "ops_bench", "2", "f32", "1,16,64"]
            text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            for rows, what, ms in re.findall(r"^ *(\d+)  (\S.*?) +([\d.]+) ms", text, re.M):
                row = times.setdefault(f"linears: {what}, {rows} rows", {n: [] for n in trees})
                row[name].append(float(ms) / 1e3)
    return times


def report(times: dict[str, Times], out: Path | None, seconds: float) -> None:
    table = Table(title=f"now against before, {seconds:.0f} s")
    for heading in ("work", "before, least ms", "now, least ms", "median ratio", "least ratio"):
        table.add_column(heading, justify="left" if heading == "work" else "right")
    rows = []
    for work, by_tree in times.items():
        before, now = by_tree["before"], by_tree["now"]
        row = dict(
            work=work,
            before_ms=min(before) * 1e3,
            now_ms=min(now) * 1e3,
            turns=statistics.median(b / a for a, b in zip(before, now, strict=True)),
            least=min(now) / min(before),
        )
        rows.append(row)
        table.add_row(
            work,
            f"{row['before_ms']:.1f}",
            f"{row['now_ms']:.1f}",
            f"{row['turns']:.3f}",
            f"{row['least']:.3f}",
        )
    Console(width=100).print(table)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(rows, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, nargs="?", help="the other tree, built")
    parser.add_argument("--model", type=Path, default=ROOT / ".cache/models/SmolLM2-135M-Instruct")
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--no-linears", action="store_true", help="without ops_bench")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve_work(options.child, options.model, options.dtype)
        return
    if not options.before or not (options.before / "build" / "dorad").exists():
        sys.exit("name the tree of before, with `dorad` and `ops_bench` built in it")
    trees = {"before": options.before.resolve(), "now": ROOT}
    begin = time.perf_counter()
    times: dict[str, Times] = {}
    for dtype in options.dtypes:
        times |= served(trees, options.model, dtype, options.repeats)
    if not options.no_linears:
        times |= linears(trees, options.repeats)
    report(times, options.json, time.perf_counter() - begin)


if __name__ == "__main__":
    main()
