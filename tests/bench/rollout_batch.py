"""A whole rollout batch, tail included: dorad with adapters, dorad's base and vLLM on one GPU, in
one run, with random weights. 128 prompts of 128 to 1,024 tokens, 8 samples of each, answers of 529
tokens in the mean (lognormal, at most 4,096) that end at their length alone; seeded.

    export DORAD_BINARY=dorad-bundle/dorad DORAD_TEST_DEVICE=cuda
    export VLLM_USE_FLASHINFER_SAMPLER=0  # where FlashInfer is not installed
    python tests/bench/rollout_batch.py --json all.json --plot all.svg

  dorad-adapter   `dorad serve` with --adapters of --kind (DoRA) and --rank
  dorad-base      the same without adapters
  vllm            vLLM in process, without adapters
  vllm-lora       vLLM with as many LoRA adapters of that rank (it refuses DoRA)

One leg at a time, where a command may not take long (the GPU must be the same), and their table:

    python tests/bench/rollout_batch.py --only dorad-adapter,dorad-base --json dorad.json
    python tests/bench/rollout_batch.py --only vllm --json vllm.json
    python tests/bench/rollout_batch.py --merge dorad.json vllm.json --json all.json --plot all.svg

Each leg has a process of its own, a warm-up and --time-limit seconds; a leg that fails is reported
with the reason. A batch is sent at once, and timed from its first request to its last answer, with
the log-probability of every token. `tail` is the time after the last moment with 32 sequences.

dorad's phases are of its metrics, read every 50 ms. Steps between two readings count together: with
prefill when any of them had some, else as decode steps of their mean rows. A step with prefill and
decode rows is one pass, whose time is not divided. `idle` has no step under way. Times of the
engine's thread run beside the steps on a GPU, except `compute`, where it waits for them.

One JSON line a leg, then Markdown tables. Without a GPU the defaults are a tiny model on the CPU:
that tries the program, no more.
"""

import argparse
import contextlib
import itertools
import json
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "client" / "src"), str(ROOT / "tools")]

import make_random_model  # noqa: E402
from bench.gpu_peers import run_logged, surroundings  # noqa: E402
from lib.markdown import table  # noqa: E402
from lib.rollout import (  # noqa: E402
    CLASSES,
    Point,
    Request,
    by_in_flight,
    make_requests,
    phases_of,
    tail_seconds,
    thinned,
)
from lib.server import Server, device, parse_metrics, serve  # noqa: E402
from lib.svg_charts import Chart, Line, picture  # noqa: E402
from lib.wire import RAW  # noqa: E402

LEGS = {
    "dorad-adapter": "dorad, {kind} r = {rank}",
    "dorad-base": "dorad, base",
    "vllm": "vLLM, base",
    "vllm-lora": "vLLM, LoRA r = {rank}",
}
REFERENCE = "vllm"
# What two files must have in common to be one table.
WORKLOAD = (
    *("shape", "layers", "rank", "adapters", "kind", "prompts", "each", "requests"),
    *("equal_lengths", "prompt", "answer", "seed", "max_sequences", "device"),
)
INTERVAL = 0.05  # seconds between two readings of the metrics
COMMIT = re.compile(r'dorad_build_info\{.*?commit="(.*?)"')
THREAD = ("schedule", "launch", "compute", "process")
WARM_UP = ("16:64", "16")
SLOWEST_START = 300.0  # seconds


def requests_of(options: argparse.Namespace, vocabulary: int) -> list[Request]:
    return make_requests(
        prompts=options.prompts,
        each=options.each,
        adapters=options.adapters,
        lengths=(options.prompt, options.answer),
        vocabulary=vocabulary,
        seed=options.seed,
        equal_lengths=options.equal_lengths,
        as_n=options.requests == "n",
    )


def warm_up_of(options: argparse.Namespace, vocabulary: int) -> list[Request]:
    """A few short requests with every adapter, whose prompts the batch does not have."""
    return make_requests(
        prompts=max(options.adapters, 4),
        each=1,
        adapters=options.adapters,
        lengths=WARM_UP,
        vocabulary=vocabulary,
        seed=options.seed + 1,
        equal_lengths=False,
        as_n=False,
    )


def result_of(
    options: argparse.Namespace, seconds: float, points: list[Point], tokens: int
) -> dict[str, Any]:
    vocabulary = make_random_model.SHAPES[options.shape].config["vocab_size"]
    expected = sum(r.samples * r.tokens for r in requests_of(options, vocabulary))
    assert tokens == expected, f"{tokens} tokens came, not {expected}"
    return {
        "seconds": round(seconds, 3),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 1),
        "tail_seconds": round(tail_seconds(points, seconds), 3),
        "by_in_flight": by_in_flight(points),
        "timeline": [[round(p.at, 3), p.in_flight, p.steps] for p in thinned(points, seconds)],
    }


# --- dorad ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def readings(server: Server) -> Iterator[list[tuple[float, str]]]:
    """The metrics page at moments of the block, its begin and its end among them."""
    found = [(time.perf_counter(), server.metrics_text())]
    over = threading.Event()

    def read() -> None:
        while not over.wait(INTERVAL):
            text = server.metrics_text()
            found.append((time.perf_counter(), text))

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
    found.append((time.perf_counter(), server.metrics_text()))


def point_of(at: float, metrics: dict[str, float], first: dict[str, float]) -> Point:
    def since(name: str) -> float:
        return metrics[name] - first[name]

    gauges = ("dorad_engine_running_sequences", "dorad_engine_waiting_sequences")
    rows = "dorad_engine_step_rows_{}{{phase={}}}".format
    return Point(
        at,
        int(sum(metrics[name] for name in gauges)),
        since("dorad_engine_step_seconds_count"),
        since("dorad_engine_step_seconds_sum"),
        since(rows("count", '"decode"')),
        since(rows("sum", '"decode"')),
        since(rows("count", '"prefill"')),
        since(rows("sum", '"prefill"')),
    )


def run_dorad(server: Server, requests: list[Request], limit: float, names: list[str]) -> int:
    """Tokens of all samples."""
    wanted: list[dict[str, Any]] = [
        dict(
            prompt=request.prompt,
            adapter=names[request.adapter] if names else "",
            n=request.samples,
            seed=request.seed,
            max_tokens=request.tokens,
            ignore_eos=True,
            logprobs=RAW,
        )
        for request in requests
    ]
    answers = server.wire.generate_many(wanted, timeout=limit)
    for request, samples in zip(requests, answers, strict=True):
        assert [len(sample.tokens) for sample in samples] == [request.tokens] * request.samples
    return sum(len(sample.tokens) for samples in answers for sample in samples)


def measure_dorad(leg: str, options: argparse.Namespace) -> dict[str, Any]:
    shape = make_random_model.Shape.read(options.shape, options.layers)
    adapters = {}
    for i in range(options.adapters if leg == "dorad-adapter" else 0):
        folder = adapters[f"adapter-{i}"] = options.folder / f"{options.kind}-{i}"
        dora = options.kind == "dora"
        make_random_model.write_adapter(shape, options.rank, folder, seed=i, dora=dora)
    settings: dict[str, object] = {"engine.max_running_sequences": options.max_sequences}
    settings["engine.kv_bytes"] = "auto" if device() == "cuda" else "256MiB"
    settings |= dict(setting.split("=", 1) for setting in options.set)
    with serve(options.folder / "model", adapters, settings, timeout=SLOWEST_START) as server:
        names, limit = list(adapters), options.time_limit
        vocabulary = shape.config["vocab_size"]
        run_dorad(server, warm_up_of(options, vocabulary), limit, names)
        requests = requests_of(options, vocabulary)
        with readings(server) as found:
            begin = time.perf_counter()
            tokens = run_dorad(server, requests, limit, names)
            seconds = time.perf_counter() - begin
        version = server.wire.info().version
    first, last = parse_metrics(found[0][1]), parse_metrics(found[-1][1])
    points = [
        point_of(min(max(at - begin, 0.0), seconds), parse_metrics(text), first)
        for at, text in found
    ]
    phase = "dorad_engine_step_phase_seconds_total"
    prompt = "dorad_prompt_tokens_total"
    return result_of(options, seconds, points, tokens) | {
        "version": version,
        "commit": next(found[1] for key in last if (found := COMMIT.match(key))),
        "settings": settings,
        "phases": phases_of(points, seconds).report(),
        "thread": {
            name: round(last[key] - first[key], 3)
            for name in THREAD
            for key in [f'{phase}{{phase="{name}"}}']
        },
        "prompt_tokens": {
            source: int(last[key] - first[key])
            for source in ("computed", "cached")
            for key in [f'{prompt}{{source="{source}"}}']
        },
        "preemptions": int(
            last["dorad_engine_preemptions_total"] - first["dorad_engine_preemptions_total"]
        ),
    }


# --- vLLM -----------------------------------------------------------------------------------------


def measure_vllm(leg: str, options: argparse.Namespace) -> dict[str, Any]:
    from lib import vllm_peer, vllm_rollout

    shape = make_random_model.Shape.read(options.shape, options.layers)
    vocabulary = shape.config["vocab_size"]
    requests = requests_of(options, vocabulary)
    llm, adapters = vllm_peer.load(
        shape,
        options.folder,
        options.adapters if leg == "vllm-lora" else 0,
        options.rank,
        max_model_len=max(len(r.prompt) + r.tokens for r in requests) + 16,
        max_num_seqs=options.max_sequences,
        enable_prefix_caching=True,
    )
    vllm_rollout.run_batch(llm, warm_up_of(options, vocabulary), adapters)
    seconds, points, tokens = vllm_rollout.run_batch(llm, requests, adapters)
    return result_of(options, seconds, points, tokens)


# --- All legs -------------------------------------------------------------------------------------


def measure(leg: str, options: argparse.Namespace) -> None:
    """In the leg's process."""
    run = measure_dorad if leg.startswith("dorad") else measure_vllm
    (options.folder / f"{leg}.json").write_text(json.dumps(run(leg, options)))


def run_leg(
    leg: str, options: argparse.Namespace, arguments: list[str], folder: Path
) -> dict[str, Any]:
    command = [sys.executable, __file__, *arguments, "--process", leg, "--folder", str(folder)]
    why, said = run_logged(command, folder / f"{leg}.log", options.time_limit)
    result = folder / f"{leg}.json"
    if result.exists():
        found: dict[str, Any] = json.loads(result.read_text())
        return found
    print(f"{leg}:", *said[-60:], sep="\n  ", file=sys.stderr)
    return {"failed": why}


def run_all(options: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    facts = surroundings(options, *WORKLOAD)
    legs = {}
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="dorad-bench-", dir=in_memory) as scratch:
        folder = Path(scratch)
        if any(leg.startswith("dorad") for leg in options.only):
            shape = make_random_model.Shape.read(options.shape, options.layers)
            make_random_model.write_model(shape, folder / "model")
        for leg in options.only:
            legs[leg] = run_leg(leg, options, arguments, folder)
            line = {key: value for key, value in legs[leg].items() if key != "timeline"}
            print(json.dumps({"leg": leg, **line}), flush=True)
    return {"facts": facts, "legs": legs}


def merge(files: list[Path]) -> dict[str, Any]:
    """One run of several: of a leg in more than one, the last."""
    runs = [json.loads(file.read_text()) for file in files]
    first, legs = runs[0]["facts"], {}
    for file, run in zip(files, runs, strict=True):
        for key in (*WORKLOAD, "gpu"):
            if run["facts"].get(key) != first.get(key):
                sys.exit(f"{file} is of another {key} than {files[0]}")
        legs |= run["legs"]
        first |= {key: value for key, value in run["facts"].items() if value is not None}
    return {"facts": first, "legs": {leg: legs[leg] for leg in LEGS if leg in legs}}


# --- Tables and the plot --------------------------------------------------------------------------


def titles(run: dict[str, Any]) -> dict[str, str]:
    kind = {"dora": "DoRA", "lora": "LoRA"}[run["facts"]["kind"]]
    return {leg: LEGS[leg].format(kind=kind, rank=run["facts"]["rank"]) for leg in run["legs"]}


def steps_cell(part: dict[str, float] | None, whole: float) -> str:
    if not part or not part["steps"]:
        return ""
    milliseconds = 1e3 * part["seconds"] / part["steps"]
    share = part["seconds"] / whole
    return f"{part['seconds']:.2f} ({share:.0%}; {part['steps']:.0f} × {milliseconds:.2f} ms)"


def totals(run: dict[str, Any]) -> str:
    reference = run["legs"].get(REFERENCE, {}).get("seconds")
    rows, notes = [], []
    for leg, title in titles(run).items():
        result = run["legs"][leg]
        if "failed" in result:
            notes.append(f"\n{title}: failed, {result['failed']}")
            continue
        ratio = f"{result['seconds'] / reference:.2f}" if reference else ""
        row = [title, f"{result['seconds']:.1f}", ratio, f"{result['tokens_per_second']:,.0f}"]
        row.append(f"{result['tail_seconds']:.1f}")
        prompt = result.get("prompt_tokens")
        row.append(f"{prompt['computed']:,} + {prompt['cached']:,}" if prompt else "")
        rows.append(row)
    heads = ["", "s", f"× {LEGS[REFERENCE]}", "tokens/s", "tail, s", "prompt, computed + cached"]
    return "\n".join([table(heads, rows), *notes])


def phases_table(run: dict[str, Any]) -> str:
    found = {leg: result for leg, result in run["legs"].items() if "phases" in result}
    if not found:
        return ""
    rows = []
    results = list(found.values())

    def add(name: str, cells: list[str]) -> None:
        if any(cells):
            rows.append([name, *cells])

    cells = [steps_cell(r["phases"]["with_prefill"], r["seconds"]) for r in results]
    add("steps with prefill", cells)
    for name in CLASSES:
        cells = [steps_cell(r["phases"]["decode"].get(name), r["seconds"]) for r in results]
        add(f"decode, {name} rows", cells)
    add("idle", [f"{r['phases']['idle']:.2f}" for r in results])
    for name in THREAD:
        add(f"engine's thread: {name}", [f"{r['thread'][name]:.2f}" for r in results])
    heads = ["s (share; steps × each)", *(titles(run)[leg] for leg in found)]
    return table(heads, rows)


def in_flight_table(run: dict[str, Any]) -> str:
    found = {leg: result for leg, result in run["legs"].items() if "failed" not in result}
    rows = []
    for name in reversed(CLASSES):
        cells = [steps_cell(r["by_in_flight"].get(name), r["seconds"]) for r in found.values()]
        if any(cells):
            rows.append([name, *cells])
    heads = ["sequences in flight", *(titles(run)[leg] for leg in found)]
    return table(heads, rows)


def plot(run: dict[str, Any]) -> str:
    everything, tail, steps, span = [], [], [], 0.0
    for leg, title in titles(run).items():
        if "failed" in run["legs"][leg]:
            continue
        points = run["legs"][leg]["timeline"]
        span = max(span, points[-1][0])
        everything.append(Line(title, [(at, count) for at, count, _ in points]))
        tail.append(Line(title, [(at, min(count, 64)) for at, count, _ in points]))
        gaps = [
            (after[0], (after[0] - before[0]) / (after[2] - before[2]))
            for before, after in itertools.pairwise(points)
            if after[2] > before[2]
        ]
        steps.append(Line(title, gaps))
    charts = [
        Chart("Sequences in flight", "short", everything),
        Chart("The same, at most 64", "short", tail),
        Chart("Time a step", "s", steps),
    ]
    facts = run["facts"]
    caption = (
        f"A rollout batch of {facts['prompts']} × {facts['each']} samples, {facts['shape']}, "
        f"{facts.get('gpu') or facts['device']}"
    )
    return picture([("", charts)], max(span, 1e-3), caption)


def report(run: dict[str, Any], options: argparse.Namespace) -> None:
    tables = [totals(run), phases_table(run), in_flight_table(run)]
    print("\n" + "\n\n".join(table for table in tables if table))
    if options.json:
        options.json.write_text(json.dumps(run, indent=1) + "\n")
    if options.plot:
        options.plot.write_text(plot(run))


def names(text: str) -> list[str]:
    chosen = text.split(",")
    for name in chosen:
        if name not in LEGS:
            raise argparse.ArgumentTypeError(f"no {name}; there are: {', '.join(LEGS)}")
    return chosen


def parse(arguments: list[str]) -> argparse.Namespace:
    on_gpu = device() == "cuda"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    shapes = make_random_model.SHAPES
    add("--shape", choices=shapes, default="qwen3-8b" if on_gpu else "tiny")
    add("--layers", type=int, default=0, help="so many of its layers (all)")
    add("--rank", type=int, default=384 if on_gpu else 8)
    add("--adapters", type=int, default=1, help="so many, which the prompts take in turns")
    add("--kind", choices=["dora", "lora"], default="dora", help="of dorad's adapters")
    add("--prompts", type=int, default=128 if on_gpu else 4)
    add("--each", type=int, default=8, help="samples of a prompt")
    add("--requests", choices=["single", "n"], default="single", help="one a sample, or a prompt")
    add("--equal-lengths", action="store_true", help="one length for all samples of a prompt")
    add("--prompt", default="128:1024" if on_gpu else "8:32", help="tokens in, as in dorad-load")
    add("--answer", default="lognormal:529:0.8:4096" if on_gpu else "lognormal:200:0.8:900")
    add("--seed", type=int, default=0)
    add("--max-sequences", type=int, default=1024, help="running at the same time, dorad and vLLM")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of dorad's")
    add("--only", type=names, default=list(LEGS), help="some of " + ",".join(LEGS))
    add("--time-limit", type=float, default=500.0, help="seconds for each leg (500)")
    add("--json", type=Path, help="writes the results")
    add("--plot", type=Path, help="writes a picture, SVG")
    add("--merge", type=Path, nargs="+", metavar="FILE", help="of earlier runs; runs nothing")
    # How this program starts itself for one leg.
    add("--process", choices=LEGS, help=argparse.SUPPRESS)
    add("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.requests == "n" and not options.equal_lengths:
        parser.error("a request has one length for all its samples: add --equal-lengths")
    options.device = device()
    return options


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    if options.process:
        measure(options.process, options)
        return
    report(merge(options.merge) if options.merge else run_all(options, arguments), options)


if __name__ == "__main__":
    main(sys.argv[1:])
