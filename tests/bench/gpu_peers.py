"""dorad and its peers on one GPU, in one run: decode steps and prefill with random weights.

    DORAD_BUNDLE=dorad-bundle python tests/bench/gpu_peers.py --shape qwen3-8b --batch 1,32,128

  dorad-base, dorad-dora   cuda_step_bench of the bundle in $DORAD_BUNDLE, else dist/dorad-bundle
  base                     Hugging Face transformers
  lora, dora               PEFT's adapters of one rank on all seven linears, unmerged
  dora-cached              PEFT's DoRA with peft.helpers.DoraCaching, which keeps B·A and the norms
  compose                  (g − 1)·base + g·s·lora in eager PyTorch, with g computed once
  vllm, vllm-lora          vLLM in process, without and with a LoRA adapter (it refuses DoRA)

A step is timed from the token that goes in to the token that comes out, greedy; of vLLM it is what
a generation of 256 tokens takes longer than one of 32, over the 224 tokens between. --context is
the mean of the timed steps.

--images N: prompts with an image of 64 x 64 patches and 16 tokens of text on either side, pixels as
the processor makes them. One that comes alone, to its first token; then N at once, to the last
one's first token, for each of them. dorad's adapter changes the tower, too; vLLM's does not.

Every peer has a process of its own and so much time; whatever it does not reach is reported as
failed, with the reason. One JSON line a case, then a Markdown table in milliseconds, with the ratio
to dorad's time for the base or for DoRA.

Without a GPU the defaults are a tiny model on the CPU: that tries the program, no more.
"""

import argparse
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]

import make_random_model  # noqa: E402
from lib import markdown  # noqa: E402

# What the table calls a peer, and whose time its ratio is to.
PEERS = {
    "dorad-base": ("dorad, base", None),
    "dorad-dora": ("dorad, DoRA", None),
    "base": ("transformers, base", "dorad-base"),
    "lora": ("PEFT LoRA", "dorad-dora"),
    "dora": ("PEFT DoRA", "dorad-dora"),
    "dora-cached": ("PEFT DoRA, caching", "dorad-dora"),
    "compose": ("eager compose, g cached", "dorad-dora"),
    "vllm": ("vLLM, base", "dorad-base"),
    "vllm-lora": ("vLLM LoRA", "dorad-dora"),
}

IMAGE_PEERS = ["dorad-base", "dorad-dora", "vllm", "vllm-lora"]

# The last line of a traceback, maybe after the name of a rank or a thread.
ERROR = re.compile(r"(\(\S+ \S+\) |\[\S+\]: ?)?[\w.]*(Error|Exception|Interrupt)\b")

Case = tuple[str, int]  # decode and rows, prefill and tokens, image and 1, images and prompts


class Report:
    """What a peer's process has measured: lines of a file, so that none is lost when it ends."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, case: Case, **result: float | str) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"case": case, **result}) + "\n")

    def attempt(self, case: Case, milliseconds: Callable[[], float]) -> None:
        try:
            self.write(case, ms=round(milliseconds(), 3))
        except Exception as error:  # this case fails, the next ones may not
            traceback.print_exc()
            self.write(case, failed=one_line(f"{type(error).__name__}: {error}"))

    def read(self) -> dict[Case, dict]:
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        results = {}
        for line in lines:
            result = json.loads(line)
            work, size = result.pop("case")
            results[work, size] = result
        return results


def one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 200 else line[:199] + "…"


def cases(options: argparse.Namespace) -> list[Case]:
    found = [("decode", batch) for batch in options.batch]
    if options.prefill:
        found.append(("prefill", options.prefill))
    if options.images:
        found += [("image", 1), ("images", options.images)]
    return found


def run_bench(program: str, options: argparse.Namespace, report: Report, *arguments: str) -> None:
    """A program of the bundle; reports what it measures."""
    bundle = Path(os.environ.get("DORAD_BUNDLE", ROOT / "dist" / "dorad-bundle"))
    if not (bundle / "run").exists():
        sys.exit(f"no bundle at {bundle}: run `make bundle`, and set DORAD_BUNDLE")
    command = [str(bundle / "run"), program, "--shape", options.shape, *arguments]
    if options.layers:
        command += ["--layers", str(options.layers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        for line in bench.stdout:
            result = json.loads(line)
            work = result.get("work")
            if work == "decode":
                report.write((work, result["batch"]), ms=result["ms"], floor_ms=result["floor_ms"])
            elif work == "prefill":
                report.write((work, result["tokens"]), ms=result["ms"])
            elif work == "image prompt":
                report.write(("image", 1), ms=result["ms"])
            elif work == "image prompts":
                report.write(("images", result["count"]), ms=result["ms"])
    if bench.returncode:
        sys.exit(bench.returncode)


def measure_dorad(peer: str, options: argparse.Namespace, report: Report) -> None:
    rank, adapters = str(options.rank), "1" if peer == "dorad-dora" else "0"
    if options.batch:
        run_bench(
            "cuda_step_bench",
            options,
            report,
            *("--adapters", adapters, "--rank", rank),
            *("--batch", ",".join(map(str, options.batch)), "--context", str(options.context)),
            *("--prefill", str(options.prefill)),
        )
    if options.images:
        run_bench(
            "cuda_image_bench",
            options,
            report,
            *("--adapters", adapters, "--rank", rank),
            *("--patches", "-1", "--steps", "0", "--requests", str(options.images)),
        )


def measure(peer: str, options: argparse.Namespace, report: Report) -> None:
    """In the peer's process."""
    if peer.startswith("dorad"):
        measure_dorad(peer, options, report)
    elif peer.startswith("vllm"):
        from lib import vllm_peer

        vllm_peer.measure(peer, options, report)
    else:
        from lib import torch_peers

        torch_peers.measure(peer, options, report)


def run_logged(command: list[str], log: Path, limit: float) -> tuple[str, list[str]]:
    """Runs a process that is gone when this returns. How it ended, and the lines that it said."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            why = f"ended with {process.wait(limit)}"
        except BaseException as error:  # not waited for yet, so that its group is surely its own
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            why = f"not within {limit:g} s"
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if said:
        # What it died of, which may be followed by what others say when they end.
        errors = [line for line in said if ERROR.match(line)]
        why = one_line(f"{why}: {(errors or said)[-1]}")
    return why, said


def run_peer(peer: str, options: argparse.Namespace, arguments: list[str], folder: Path) -> dict:
    """The results of all cases."""
    report = Report(folder / f"{peer}.jsonl")
    command = [sys.executable, __file__, *arguments, "--process", peer, "--folder", str(folder)]
    why, said = run_logged(command, folder / f"{peer}.log", options.time_limit)
    found = report.read()
    if said and len(found) < len(cases(options)):
        print(f"{peer}:", *said[-60:], sep="\n  ", file=sys.stderr)
    return {case: found.get(case, {"failed": why}) for case in cases(options)}


def surroundings(options: argparse.Namespace, *keys: str) -> dict:
    """What the figures are of: these options, the versions, the GPU and the date."""
    facts = {key: getattr(options, key) for key in keys}
    for package in ("torch", "transformers", "peft", "vllm"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = None
    commit = Path(os.environ.get("DORAD_BUNDLE", ROOT / "dist" / "dorad-bundle")) / "COMMIT"
    facts["dorad"] = commit.read_text().strip() if commit.exists() else None
    if options.device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        try:
            answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
            facts["gpu"] = answer.stdout.splitlines()[0]
        except (OSError, subprocess.SubprocessError) as error:
            facts["gpu"] = one_line(str(error))
    facts["date"] = time.strftime("%Y-%m-%d", time.gmtime())
    return facts


def table(results: dict[str, dict[Case, dict]], columns: list[Case]) -> str:
    names = {
        "decode": "decode, batch {}",
        "prefill": "prefill {}",
        "image": "an image, first token",
        "images": "of {} images, each",
    }
    heads = [names[work].format(size) for work, size in columns]
    rows: list[list[str]] = []
    notes: list[str] = []

    def failed(note: str) -> str:
        if note not in notes:
            notes.append(note)
        return f"failed ({notes.index(note) + 1})"

    for peer, row in results.items():
        title, ours = PEERS[peer]
        cells = []
        for case in columns:
            if "failed" in row[case]:
                cells.append(failed(f"{title}: {row[case]['failed']}"))
                continue
            mine = results.get(ours, {}).get(case, {}).get("ms") if ours else None
            ratio = f" ({row[case]['ms'] / mine:.2f} ×)" if mine else ""
            cells.append(f"{row[case]['ms']:.2f}{ratio}")
        rows.append([title, *cells])
    lines = [markdown.table(["ms", *heads], rows), *[""] * bool(notes)]
    return "\n".join(lines + [f"{i}. {n}" for i, n in enumerate(notes, 1)])


def numbers(text: str) -> list[int]:
    if text == "0":
        return []
    values = [int(part) for part in text.split(",")]
    if min(values) < 1:
        raise ValueError(text)
    return values


def names(text: str) -> list[str]:
    chosen = text.split(",")
    unknown = [name for name in chosen if name not in PEERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no {unknown[0]}; there are: {', '.join(PEERS)}")
    return chosen


def parse(arguments: list[str]) -> argparse.Namespace:
    on_gpu = Path("/dev/nvidiactl").exists()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", choices=make_random_model.SHAPES, default="qwen3-8b" if on_gpu else "tiny")
    add("--layers", type=int, default=0, help="so many of its layers (all)")
    batches = [1, 32, 128, 256] if on_gpu else [1, 2]
    add("--batch", type=numbers, default=batches, help="of decode steps; 0: no steps, no prefill")
    add("--rank", type=int, default=384 if on_gpu else 8)
    add("--context", type=int, default=656 if on_gpu else 48, help="mean of the decode steps")
    add("--prefill", type=int, default=4096 if on_gpu else 32, help="tokens; 0 for none")
    add("--images", type=int, default=0, help="so many prompts with an image; 0 for none")
    add(
        "--vllm-compiles",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="off: vLLM starts sooner, with graphs of decode steps, without torch.compile",
    )
    add("--only", type=names, help="some of " + ",".join(PEERS) + " (all that can)")
    add("--device", choices=["cuda", "cpu"], default="cuda" if on_gpu else "cpu")
    add("--time-limit", type=float, default=300.0, help="seconds for each peer (300)")
    # How this program starts itself for one peer.
    add("--process", choices=PEERS, help=argparse.SUPPRESS)
    add("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    able = IMAGE_PEERS if options.images else list(PEERS)
    options.only = options.only or able
    if not set(options.only) <= set(able):
        parser.error("--images takes --only of " + ",".join(able))
    if not options.batch:
        options.prefill = 0
    return options


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    if options.process:
        measure(options.process, options, Report(options.folder / f"{options.process}.jsonl"))
        return
    facts = surroundings(options, "shape", "layers", "rank", "context", "device", "vllm_compiles")
    print(json.dumps(facts), flush=True)
    results = {}
    with tempfile.TemporaryDirectory(prefix="dorad-peers-") as folder:
        for peer in options.only:
            results[peer] = run_peer(peer, options, arguments, Path(folder))
            for (work, size), result in results[peer].items():
                line = {"peer": peer, "work": work, "size": size, **result}
                print(json.dumps(line), flush=True)
    print("\n" + table(results, cases(options)))


if __name__ == "__main__":
    main(sys.argv[1:])
