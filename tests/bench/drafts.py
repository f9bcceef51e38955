"""Drafts: how many tokens a step they bring, and the time against none.

    python tests/bench/drafts.py --moves 0,1e-4,1e-3,1e-2
        Old answers as drafts. Prompts are answered under an adapter, and again, with the same
        seeds, under adapters that moved from it: without drafts, and with the old answers. Random
        weights (--shape), or --model and --adapter folders with prompts of real text.
    python tests/bench/drafts.py --ngrams --model FOLDER [--adapter FOLDER]
        N-grams as drafts, on real text of several kinds (tests/lib/task_prompts.py), at several
        temperatures and numbers of samples: with ngram_drafts and without, by turns.

The server is $DORAD_BINARY, on $DORAD_TEST_DEVICE. A move is the part of the DoRA magnitudes that
change by 2 %; 0 is the same version. The KL of a token is estimated over the old answers, as the
mean of r - 1 - log r, with r the ratio of the new probability to the old one: in bf16 it is 0 or
what rounding makes of it, at the low temperatures of random weights.
--entropy sets the temperature so that a token has so many nats, as a trained model's: random
weights have nearly ln(vocabulary) at 1. Tokens and log-probabilities with drafts must be bitwise
those without. Times are of the whole batch, sent at once; the shares are of generated tokens.
"""

import argparse
import dataclasses
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "client" / "src"), str(ROOT / "tools")]

import make_random_model  # noqa: E402
from bench.gpu_peers import surroundings  # noqa: E402
from dorad.text import ModelText  # noqa: E402
from lib.rollout import Request, make_requests  # noqa: E402
from lib.server import Server, device, serve  # noqa: E402
from lib.task_prompts import KINDS, task_prompts  # noqa: E402
from lib.wire import SCALED, Sample  # noqa: E402

NAME = "policy"
SCORED = 128  # tokens of an answer for an estimate of KL or entropy


@dataclasses.dataclass
class Run:
    seconds: float
    steps: float
    samples: list[Sample]

    @property
    def tokens(self) -> int:
        return sum(len(sample.tokens) for sample in self.samples)

    def same(self, other: "Run") -> bool:
        return [(s.tokens, s.logprobs.tobytes()) for s in self.samples] == [
            (s.tokens, s.logprobs.tobytes()) for s in other.samples
        ]

    def facts(self) -> dict[str, float]:
        usages = [sample.finish.usage for sample in self.samples]
        drafted = sum(usage.draft_tokens for usage in usages)
        accepted = sum(usage.accepted_draft_tokens for usage in usages)
        return {
            "seconds": round(self.seconds, 3),
            "steps": self.steps,
            "verified": round(drafted / self.tokens, 3),
            "accepted": round(accepted / self.tokens, 3),
        }


def run(server: Server, wanted: Sequence[dict[str, Any]], limit: float) -> Run:
    steps = server.metric("dorad_engine_step_seconds_count")
    begin = time.perf_counter()
    answers = server.wire.generate_many(list(wanted), timeout=limit)
    seconds = time.perf_counter() - begin
    steps = server.metric("dorad_engine_step_seconds_count") - steps
    return Run(seconds, steps, [sample for samples in answers for sample in samples])


# --- Old answers ----------------------------------------------------------------------------------


def moved(folder: Path, by: float, out: Path) -> Path:
    """A copy of the adapter, in which this part of the magnitudes has moved by 2 % of themselves:
    more than what bf16 rounds off. Beyond 1, all have moved by more."""
    rng = np.random.default_rng(1)
    out.mkdir()
    shutil.copy(folder / "adapter_config.json", out)
    image = memoryview((folder / "adapter_model.safetensors").read_bytes())
    size = int.from_bytes(image[:8], "little")
    header = json.loads(bytes(image[8 : 8 + size]))
    parts, end = [], 0
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        first, last = (8 + size + offset for offset in tensor["data_offsets"])
        part: Any = image[first:last]
        if "lora_magnitude_vector" in name:
            bits = np.frombuffer(part, "<u2" if tensor["dtype"] == "BF16" else "<u4")
            values = (bits.astype("<u4") << (16 if bits.itemsize == 2 else 0)).view("<f4")
            move = rng.choice([-0.02, 0.02], values.size) * math.sqrt(max(by, 1))
            move *= rng.random(values.size) < by
            part = (values * (1 + move)).astype("<f4").tobytes()
            tensor["dtype"] = "F32"
        tensor["data_offsets"] = [end, end + len(part)]
        end += len(part)
        parts.append(part)
    text = json.dumps(header).encode()
    with (out / "adapter_model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.writelines([text, *parts])
    return out


class Rollout:
    """A batch of requests under one adapter name, whose versions move."""

    def __init__(self, server: Server, requests: list[Request], options: argparse.Namespace):
        self.server, self.requests, self.limit = server, requests, options.time_limit
        self.temperature = options.temperature

    def wanted(self, **changes: Any) -> list[dict[str, Any]]:
        return [
            dict(
                prompt=request.prompt,
                adapter=NAME,
                seed=request.seed,
                max_tokens=request.tokens,
                temperature=self.temperature,
                ignore_eos=True,
                logprobs=SCALED,
            )
            | changes
            for request in self.requests
        ]

    def entropy(self) -> float:
        """Of a token, in nats: minus the mean log-probability of what is sampled."""
        short = run(self.server, self.wanted(max_tokens=64)[:8], self.limit)
        return -float(np.mean(np.concatenate([sample.logprobs for sample in short.samples])))

    def set_entropy(self, target: float) -> None:
        low, high = 1e-3, 2.0
        for _ in range(12):
            self.temperature = math.sqrt(low * high)
            if self.entropy() < target:
                low = self.temperature
            else:
                high = self.temperature

    def kl(self, old: Run) -> float:
        """A token's, of the old version from the active one."""
        terms = []
        for request, sample in list(zip(self.requests, old.samples, strict=True))[:32]:
            ids = request.prompt + sample.tokens[:SCORED]
            ((score,),) = self.server.wire.score([ids], [NAME], temperature=self.temperature)
            ratio = score.logprobs[len(request.prompt) :] - sample.logprobs[:SCORED]
            terms.append(np.expm1(ratio.astype(np.float64)) - ratio)
        return float(np.mean(np.concatenate(terms)))


def requests_of(options: argparse.Namespace, model: Path) -> list[Request]:
    """With prompts of real text for a model that was given."""
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    requests = make_requests(
        prompts=options.prompts,
        each=options.each,
        adapters=1,
        lengths=(options.prompt, options.answer),
        vocabulary=vocabulary,
        seed=options.seed,
        equal_lengths=False,
        as_n=False,
    )
    if options.model is None:
        return requests
    texts = [prompt for kind in KINDS for prompt in task_prompts(ModelText(model), kind)]
    return [
        dataclasses.replace(request, prompt=texts[i // options.each % len(texts)])
        for i, request in enumerate(requests)
    ]


def measure_old_answers(options: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    model, adapter = options.model, options.adapter
    if model is None:
        shape = make_random_model.Shape.read(options.shape, options.layers)
        model, adapter = scratch / "model", scratch / "adapter"
        make_random_model.write_model(shape, model)
        make_random_model.write_adapter(shape, options.rank, adapter)
    requests = requests_of(options, model)
    rows = []
    with serve(model, {NAME: adapter}, settings_of(options), timeout=300) as server:
        rollout = Rollout(server, requests, options)
        if options.entropy:
            rollout.set_entropy(options.entropy)
        facts = {"temperature": round(rollout.temperature, 5)}
        facts["entropy"] = round(rollout.entropy(), 3)
        old = run(server, rollout.wanted(), options.time_limit)
        for move in options.moves:
            if move:
                folder = moved(adapter, move, scratch / f"moved-{move}")
                server.wire.publish(NAME, folder, activate=True)
                shutil.rmtree(folder)
            kl = rollout.kl(old)
            plain = run(server, rollout.wanted(), options.time_limit)
            drafted = [
                want | dict(drafts=[sample.tokens])
                for want, sample in zip(rollout.wanted(), old.samples, strict=True)
            ]
            with_drafts = run(server, drafted, options.time_limit)
            equal = [
                np.equal(new.tokens, before.tokens)
                for new, before in zip(plain.samples, old.samples, strict=True)
            ]
            # Tokens before the first other one, of all that could be.
            first = sum(int(np.argmin(np.append(places, False))) for places in equal)
            rows.append(
                {"move": move, "kl": float(f"{kl:.2e}"), **facts}
                | {"equal_places": round(float(np.mean(np.concatenate(equal))), 3)}
                | {"before_first_other": round(first / plain.tokens, 3)}
                | with_drafts.facts()
                | {"seconds_without": round(plain.seconds, 3), "steps_without": plain.steps}
                | {"times": round(plain.seconds / with_drafts.seconds, 2)}
                | {"tokens": plain.tokens, "same_bits": with_drafts.same(plain)}
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


# --- N-grams --------------------------------------------------------------------------------------


def measure_ngrams(options: argparse.Namespace) -> list[dict[str, Any]]:
    text = ModelText(options.model)
    adapters = {NAME: options.adapter} if options.adapter else {}
    rows = []
    with serve(options.model, adapters, settings_of(options), timeout=300) as server:
        for sequences in options.sequences:
            for temperature in options.temperatures:
                for kind in KINDS:
                    prompts = task_prompts(text, kind)
                    # Groups of eight samples, as GRPO draws them.
                    n = min(8, sequences)
                    wanted = [
                        dict(
                            prompt=prompts[i % len(prompts)],
                            adapter=NAME if adapters else "",
                            n=n,
                            seed=i,
                            max_tokens=options.tokens,
                            temperature=temperature,
                            logprobs=SCALED if temperature else None,
                        )
                        for i in range(max(sequences // n, 1))
                    ]
                    row = compare_ngrams(server, wanted, options)
                    rows.append({"kind": kind, "t": temperature, "sequences": sequences} | row)
                    print(json.dumps(rows[-1]), flush=True)
    return rows


def compare_ngrams(
    server: Server, wanted: list[dict[str, Any]], options: argparse.Namespace
) -> dict[str, Any]:
    ratios, with_ngrams, without = [], [], []
    for _ in range(options.repeats):
        for found, on in ((without, False), (with_ngrams, True)):
            found.append(
                run(server, [w | dict(ngram_drafts=on) for w in wanted], options.time_limit)
            )
        ratios.append(without[-1].seconds / with_ngrams[-1].seconds)
    tokens = with_ngrams[0].tokens
    same = [
        [s.tokens for s in a.samples] == [s.tokens for s in b.samples]
        for a, b in zip(with_ngrams, without, strict=True)
    ]
    return with_ngrams[0].facts() | {
        "tokens_per_second": round(tokens / statistics.median(r.seconds for r in with_ngrams), 1),
        "fewer_steps": round(without[0].steps / with_ngrams[0].steps, 2),
        "times": round(statistics.median(ratios), 3),
        "same_tokens": all(same),
    }


# --- All ------------------------------------------------------------------------------------------


def settings_of(options: argparse.Namespace) -> dict[str, object]:
    settings: dict[str, object] = {"engine.max_running_sequences": 1024}
    settings["engine.kv_bytes"] = "auto" if device() == "cuda" else "512MiB"
    settings["adapters.keep_last"] = 1
    return settings | dict(setting.split("=", 1) for setting in options.set)


def floats(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse(arguments: list[str]) -> argparse.Namespace:
    on_gpu = device() == "cuda"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ngrams", action="store_true", help="measures n-grams instead of old answers")
    add("--shape", choices=make_random_model.SHAPES, default="qwen3-8b" if on_gpu else "tiny")
    add("--layers", type=int, default=0, help="so many of its layers (all)")
    add("--rank", type=int, default=384 if on_gpu else 8)
    add("--model", type=Path, help="a model's folder instead of a shape")
    add("--adapter", type=Path, help="its adapter's folder")
    add("--moves", type=floats, default=[0.0, 1e-4, 1e-3, 1e-2])
    add("--temperature", type=float, default=1.0)
    add("--entropy", type=float, default=0.0, help="sets the temperature: nats a token")
    add("--prompts", type=int, default=8)
    add("--each", type=int, default=1, help="samples of a prompt")
    add("--prompt", default="128:1024" if on_gpu else "8:32", help="tokens in, as in dorad-load")
    add("--answer", default="2048" if on_gpu else "200", help="tokens out")
    add("--temperatures", type=floats, default=[0.0, 0.7, 1.0], help="of n-grams")
    add("--sequences", type=integers, default=[1, 8, 64], help="of n-grams")
    add("--tokens", type=int, default=256, help="of each answer with n-grams")
    add("--repeats", type=int, default=3, help="of each case with n-grams, by turns")
    add("--seed", type=int, default=0)
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of dorad's")
    add("--time-limit", type=float, default=500.0, help="seconds for each batch (500)")
    add("--json", type=Path, help="writes the results")
    options = parser.parse_args(arguments)
    if (options.ngrams or options.adapter) and options.model is None:
        parser.error("--ngrams and --adapter need --model")
    if options.model and not options.ngrams and options.adapter is None:
        parser.error("--model needs --adapter")
    options.device = device()
    return options


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="dorad-bench-", dir=in_memory) as scratch:
        if options.ngrams:
            rows = measure_ngrams(options)
        else:
            rows = measure_old_answers(options, Path(scratch))
    if options.json:
        facts = surroundings(options, "device", "shape", "rank", "prompts", "each", "answer")
        options.json.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
