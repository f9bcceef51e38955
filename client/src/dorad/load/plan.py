"""Lengths, adapters and arrival times of a run. Equal plans send equal requests."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import re
from dataclasses import dataclass, field

from dorad.load.data import Sample
from dorad.load.target import Vocabulary
from dorad.types import GenerateRequest

_LONGEST = 1 << 20
_SEEDS = 1 << 62  # Requests and processes add to the plan's seed.


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts.

    Written "128" (fixed), "32:256" (uniform, both ends included) or "lognormal:200:0.5" (mean and
    sigma of the logarithm), optionally with a cap: "lognormal:200:0.5:1024".
    """

    kind: str
    a: float
    b: float = 0.0
    cap: int = _LONGEST

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Raises ValueError that shows the valid forms."""
        if re.fullmatch(r"\d+", text) and 0 < int(text) <= _LONGEST:
            return cls("fixed", int(text))
        if match := re.fullmatch(r"(\d+):(\d+)", text):
            low, high = int(match[1]), int(match[2])
            if 0 < low <= high <= _LONGEST:
                return cls("uniform", low, high)
        if match := re.fullmatch(r"lognormal:([\d.]+):([\d.]+)(?::(\d+))?", text):
            mean, sigma, cap = float(match[1]), float(match[2]), int(match[3] or _LONGEST)
            if mean >= 1 and 1 <= cap <= _LONGEST:
                return cls("lognormal", mean, sigma, cap)
        raise ValueError(
            f"{text!r} is not a length up to {_LONGEST}: 128, 32:256 or lognormal:MEAN:SIGMA[:CAP]"
        )

    def draw(self, rng: random.Random) -> int:
        if self.kind == "fixed":
            return int(self.a)
        if self.kind == "uniform":
            return rng.randint(int(self.a), int(self.b))
        # The mean of a lognormal is exp(mu + sigma²/2).
        mu = math.log(self.a) - self.b**2 / 2
        return max(1, min(self.cap, round(rng.lognormvariate(mu, self.b))))


@dataclass(frozen=True)
class Popularity:
    """Distribution of requests over adapters."""

    adapters: list[str | None]
    weights: list[float]

    @classmethod
    def parse(cls, items: list[str], zipf: float | None) -> Popularity:
        """Items are "name", "name@version" or "base", each with an optional "=WEIGHT".

        With `zipf` the i-th item (from 1) has weight i^-zipf, and items must not have weights.
        """
        if not items:
            return cls([None], [1.0])
        names: list[str | None] = []
        weights: list[float] = []
        for i, item in enumerate(items, 1):
            name, equals, weight = item.partition("=")
            if zipf is not None and equals:
                raise ValueError(f"{item!r} has a weight, but --zipf sets the weights by order")
            names.append(None if name == "base" else name)
            weights.append(i**-zipf if zipf is not None else float(weight or 1))
        if min(weights) < 0 or sum(weights) <= 0:
            raise ValueError("adapter weights must not be negative or all zero")
        return cls(names, weights)

    def draw(self, rng: random.Random) -> str | None:
        return rng.choices(self.adapters, self.weights)[0]


@dataclass(frozen=True)
class Goals:
    """Latency goals for goodput, in seconds. None: no goal."""

    ttft: float | None = None
    itl: float | None = None
    """Mean time between the tokens of a request."""
    e2e: float | None = None

    def any(self) -> bool:
        return any(goal is not None for goal in (self.ttft, self.itl, self.e2e))


@dataclass(frozen=True)
class Plan:
    """Settings of a run. Exactly one of `rate` and `concurrency` is set.

    Raises ValueError for a seed outside [0, 2^62).
    """

    prompt: Lengths
    output: Lengths
    popularity: Popularity
    rate: float | None = None
    """Requests per second (open loop)."""
    concurrency: int | None = None
    """Requests in flight (closed loop)."""
    requests: int | None = None
    """Number of requests after the warm-up."""
    duration: float | None = None
    """Seconds of sending after the warm-up. The run then waits for requests in flight."""
    warmup: float = 0.0
    """Seconds before the measurement. Their requests are sent but not counted."""
    n: int = 1
    shared_prefix: int = 0
    """Number of leading tokens that all prompts share."""
    temperature: float = 1.0
    seed: int = 0
    prefix_seed: int | None = None
    """Seed of the shared prefix, which is equal in all parts of a split plan. None: `seed`."""
    goals: Goals = field(default_factory=lambda: Goals())
    samples: tuple[Sample, ...] = ()
    """Prompts to send, in this order and again from the start. Empty: random ones of `prompt`."""
    first_sample: int = 0
    sample_step: int = 1
    """A part of a split plan sends every `sample_step`-th one."""
    ignore_eos: bool = True
    """Every answer gets its drawn length."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < _SEEDS:
            raise ValueError(f"seed must be in [0, 2^62), not {self.seed}")

    def split(self, processes: int) -> list[Plan]:
        """One plan for each process. Together they offer the load of this plan."""

        def part(whole: int | None, i: int) -> int | None:
            if whole is None:
                return None
            return whole * (i + 1) // processes - whole * i // processes

        return [
            dataclasses.replace(
                self,
                # Independent Poisson processes add up to one.
                rate=None if self.rate is None else self.rate / processes,
                concurrency=part(self.concurrency, i),
                requests=part(self.requests, i),
                seed=self.seed + (i << 32),
                prefix_seed=self.seed if self.prefix_seed is None else self.prefix_seed,
                first_sample=self.first_sample + i * self.sample_step,
                sample_step=self.sample_step * processes,
            )
            for i in range(processes)
        ]


class Source:
    """Draws requests. Equal plans give equal requests."""

    def __init__(self, plan: Plan, words: Vocabulary) -> None:
        self._plan = plan
        self._rng = random.Random(plan.seed)
        self._ids = [i for i in range(words.size) if i not in words.reserved] or [0]
        # Not self._rng, which differs between the parts of a plan.
        prefix_seed = plan.seed if plan.prefix_seed is None else plan.prefix_seed
        prefix = random.Random(f"prefix {prefix_seed}")
        self._prefix = prefix.choices(self._ids, k=plan.shared_prefix)
        self._numbers = itertools.count()

    def gap(self) -> float:
        """Seconds to the next arrival."""
        assert self._plan.rate is not None
        return self._rng.expovariate(self._plan.rate)

    def next(self) -> GenerateRequest:
        plan, rng, number = self._plan, self._rng, next(self._numbers)
        adapter = plan.popularity.draw(rng)
        if plan.samples:
            sample = plan.samples[
                (plan.first_sample + number * plan.sample_step) % len(plan.samples)
            ]
        else:
            rest = max(0, plan.prompt.draw(rng) - plan.shared_prefix)
            sample = Sample((self._prefix + rng.choices(self._ids, k=rest)) or [self._ids[0]])
        return GenerateRequest(
            sample.token_ids,
            adapter=adapter,
            n=plan.n,
            max_tokens=sample.max_tokens or plan.output.draw(rng),
            ignore_eos=plan.ignore_eos,
            temperature=plan.temperature,
            seed=plan.seed + number,
        )
