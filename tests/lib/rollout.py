"""A rollout batch for tests/bench/rollout_batch.py: its requests, and where a server's time for it
goes, from a series of points in time."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from dorad.load import Lengths

FIRST_TOKEN = 10  # of random prompts: smaller ids may be special ones
TAIL = 32  # sequences; with fewer the batch is in its tail
ROWS = (1, 32, 128, 256, 384, 512, 768)  # where classes of rows begin


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    adapter: int
    samples: int
    tokens: int  # of each sample
    seed: int


def make_requests(
    *,
    prompts: int,
    each: int,
    adapters: int,
    lengths: tuple[str, str],
    vocabulary: int,
    seed: int,
    equal_lengths: bool,
    as_n: bool,
) -> list[Request]:
    """Each prompt's samples one after the other, as RL libraries send them. The adapters take
    turns with the prompts. With `as_n` one request has all samples of a prompt, which are equally
    long."""
    if as_n and not equal_lengths:
        raise ValueError("a request has one length for all its samples: add --equal-lengths")
    rng = random.Random(seed)
    prompt_length, answer_length = map(Lengths.parse, lengths)
    requests: list[Request] = []
    for number in range(prompts):
        length = prompt_length.draw(rng)
        prompt = [rng.randrange(FIRST_TOKEN, vocabulary) for _ in range(length)]
        answers = [answer_length.draw(rng)] * each if equal_lengths else []
        answers = answers or [answer_length.draw(rng) for _ in range(each)]
        for tokens in answers[:1] if as_n else answers:
            requests.append(
                Request(prompt, number % adapters, each if as_n else 1, tokens, len(requests))
            )
    return requests


@dataclass(frozen=True)
class Point:
    """A moment of the batch. All but the first two are counts since the begin; those after `steps`
    are a server's, of which vLLM's engine does not tell."""

    at: float
    in_flight: int  # sequences that have not ended
    steps: float
    stepping: float = 0.0  # seconds of steps
    decode_steps: float = 0.0
    decode_rows: float = 0.0
    prefill_steps: float = 0.0
    prefill_rows: float = 0.0


@dataclass
class Part:
    """Some of the steps."""

    seconds: float = 0.0
    steps: float = 0.0
    decode_rows: float = 0.0
    prefill_rows: float = 0.0

    def add(self, seconds: float, before: Point, after: Point) -> None:
        self.seconds += seconds
        self.steps += after.steps - before.steps
        self.decode_rows += after.decode_rows - before.decode_rows
        self.prefill_rows += after.prefill_rows - before.prefill_rows

    def report(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in vars(self).items()}


@dataclass
class Phases:
    with_prefill: Part = field(default_factory=Part)
    decode: dict[str, Part] = field(default_factory=dict)
    idle: float = 0.0

    def report(self) -> dict[str, Any]:
        return {
            "with_prefill": self.with_prefill.report(),
            "decode": {name: part.report() for name, part in self.decode.items() if part.steps},
            "idle": round(self.idle, 4),
        }


def rows_class(rows: float) -> str:
    first = max((begin for begin in ROWS if begin <= rows), default=ROWS[0])
    if first == ROWS[-1]:
        return f"{first} and more"
    return f"{first} to {ROWS[ROWS.index(first) + 1] - 1}"


CLASSES = [rows_class(rows) for rows in ROWS]


def phases_of(points: Sequence[Point], seconds: float) -> Phases:
    """The steps between two points count together: as steps with prefill when any had some, else as
    decode steps of their mean rows. The rest of the time has no step under way."""
    phases = Phases(decode={name: Part() for name in CLASSES})
    before = points[0]
    for after in points[1:]:
        kinds = after.prefill_steps + after.decode_steps
        if after.steps == before.steps or kinds == before.prefill_steps + before.decode_steps:
            continue  # the counters of a step move one after the other
        stepping = after.stepping - before.stepping
        if after.prefill_steps > before.prefill_steps:
            phases.with_prefill.add(stepping, before, after)
        else:
            rows = (after.decode_rows - before.decode_rows) / (
                after.decode_steps - before.decode_steps
            )
            phases.decode[rows_class(rows)].add(stepping, before, after)
        before = after
    phases.idle = seconds - (points[-1].stepping - points[0].stepping)
    return phases


def by_in_flight(points: Sequence[Point]) -> dict[str, dict[str, float]]:
    """Time and steps while so many sequences had not ended; the sequences at the later point."""
    parts = {name: Part() for name in CLASSES}
    for before, after in pairwise(points):
        parts[rows_class(after.in_flight)].add(after.at - before.at, before, after)
    return {
        name: {"seconds": round(part.seconds, 4), "steps": part.steps}
        for name, part in parts.items()
        if part.seconds
    }


def tail_seconds(points: Sequence[Point], seconds: float) -> float:
    """From the last point with TAIL sequences or more to the end."""
    return seconds - max((p.at for p in points if p.in_flight >= TAIL), default=0.0)


def thinned(points: Sequence[Point], seconds: float, most: int = 400) -> list[Point]:
    """At most so many points, the last one included."""
    result: list[Point] = []
    for point in points[:-1]:
        if not result or point.at - result[-1].at >= seconds / (most - 2):
            result.append(point)
    return [*result, points[-1]]
