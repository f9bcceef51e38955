"""tests/bench/rollout_batch.py with a tiny model on the CPU: what it reports, and of what."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from bench import rollout_batch
from lib.rollout import Point, by_in_flight, make_requests, phases_of, tail_seconds, thinned

SMALL = ["--prompts", "5", "--each", "2", "--prompt", "8:24", "--answer", "lognormal:40:0.8:96"]
SHAPE = dict(
    prompts=5, each=2, adapters=2, lengths=("8:24", "lognormal:40:0.8:96"), vocabulary=512, seed=0
)


def run(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, rollout_batch.__file__, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == code, done.stderr
    return done


def test_legs_of_two_runs_are_one_table(tmp_path: Path) -> None:
    ours, theirs, both = (tmp_path / name for name in ("ours.json", "theirs.json", "both.json"))
    common = [*SMALL, "--adapters", "2"]
    run(*common, "--only", "dorad-adapter,dorad-base", "--json", ours)
    run(*common, "--only", "vllm", "--time-limit", "0.01", "--json", theirs)
    done = run("--merge", ours, theirs, "--json", both, "--plot", tmp_path / "plot.svg")
    legs = json.loads(both.read_text())["legs"]
    assert list(legs) == ["dorad-adapter", "dorad-base", "vllm"]
    requests = make_requests(**SHAPE, equal_lengths=False, as_n=False)
    for leg in ("dorad-adapter", "dorad-base"):
        result = legs[leg]
        assert result["tokens"] == sum(request.tokens for request in requests)
        prompt = result["prompt_tokens"]
        assert prompt["computed"] + prompt["cached"] == sum(len(r.prompt) for r in requests)
        phases = result["phases"]
        parts = [phases["with_prefill"], *phases["decode"].values()]
        # Each sample's first token comes out of its prompt's last row.
        assert sum(part["decode_rows"] for part in parts) == result["tokens"] - len(requests)
        assert sum(part["prefill_rows"] for part in parts) == prompt["computed"]
        assert sum(p["seconds"] for p in parts) + phases["idle"] == pytest.approx(
            result["seconds"], abs=2e-3
        )
    assert "not within 0.01 s" in legs["vllm"]["failed"]
    assert "| dorad, DoRA r = 8 |" in done.stdout
    assert "vLLM, base: failed, not within 0.01 s" in done.stdout
    titles = ElementTree.parse(tmp_path / "plot.svg").getroot().itertext()
    assert "Sequences in flight" in list(titles)


def test_runs_of_different_batches_are_not_merged(tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for seed, file in enumerate(files):
        arguments = ["--seed", seed, "--only", "vllm", "--time-limit", "0.01", "--json", file]
        run(*SMALL, *arguments)
    assert "another seed" in run("--merge", *files, code=1).stderr


def test_requests_of_n_have_the_lengths_of_single_ones() -> None:
    single = make_requests(**SHAPE, equal_lengths=True, as_n=False)
    grouped = make_requests(**SHAPE, equal_lengths=True, as_n=True)
    assert [(r.prompt, r.adapter, r.tokens) for r in single] == [
        (r.prompt, r.adapter, r.tokens) for r in grouped for _ in range(r.samples)
    ]
    assert {r.adapter for r in single} == {0, 1}
    with pytest.raises(ValueError, match="equal-lengths"):
        make_requests(**SHAPE, equal_lengths=False, as_n=True)


def test_requests_of_n_run(tmp_path: Path) -> None:
    file = tmp_path / "n.json"
    run(*SMALL, "--requests", "n", "--equal-lengths", "--only", "dorad-base", "--json", file)
    result = json.loads(file.read_text())["legs"]["dorad-base"]
    requests = make_requests(**SHAPE, equal_lengths=True, as_n=True)
    assert result["tokens"] == sum(r.samples * r.tokens for r in requests)


def test_time_goes_to_the_steps_between_two_points() -> None:
    points = [
        Point(0.0, 0, 0),
        Point(0.1, 300, 2, 0.08, 1, 10, 2, 900),  # one of both kinds, one of prefill
        Point(0.2, 300, 6, 0.16, 5, 10 + 4 * 256, 2, 900),
        Point(0.3, 300, 6, 0.16, 5, 10 + 4 * 256, 2, 900),  # no step
        Point(0.5, 20, 8, 0.36, 7, 10 + 4 * 256 + 2 * 31, 2, 900),
        Point(0.6, 0, 8, 0.36, 7, 10 + 4 * 256 + 2 * 31, 2, 900),
    ]
    phases = phases_of(points, 0.6).report()
    assert phases["with_prefill"] == {
        "seconds": 0.08,
        "steps": 2,
        "decode_rows": 10,
        "prefill_rows": 900,
    }
    assert {name: (p["seconds"], p["steps"]) for name, p in phases["decode"].items()} == {
        "1 to 31": (0.2, 2),
        "256 to 383": (0.08, 4),
    }
    assert phases["idle"] == pytest.approx(0.24)
    assert by_in_flight(points) == {
        "1 to 31": {"seconds": 0.3, "steps": 2},
        "256 to 383": {"seconds": 0.3, "steps": 6},
    }
    assert tail_seconds(points, 0.6) == pytest.approx(0.3)
    assert thinned(points, 0.6, 4)[-1] == points[-1]
    assert len(thinned(points, 0.6, 4)) <= 4


class Engine:
    """In the place of vLLM's: each step gives every sample in flight one token."""

    def __init__(self) -> None:
        self.left: dict[str, tuple[int, int, int]] = {}  # samples, tokens, tokens left
        self.loras: list[object] = []

    def add_request(self, name, prompt, sampling, lora_request) -> None:
        assert prompt["prompt_token_ids"] and name not in self.left
        assert sampling.ignore_eos and sampling.logprobs == 0
        self.left[name] = (sampling.n, sampling.max_tokens, sampling.max_tokens)
        self.loras.append(lora_request)

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def get_num_unfinished_requests(self) -> int:
        return sum(samples for samples, _, _ in self.left.values())

    def step(self) -> list:
        ended = []
        for name, (samples, tokens, left) in list(self.left.items()):
            self.left[name] = (samples, tokens, left - 1)
            if left == 1:
                del self.left[name]
                output = SimpleNamespace(token_ids=[0] * tokens)
                ended.append(SimpleNamespace(outputs=[output] * samples))
        return ended


def test_vllm_gets_the_same_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins = {
        "vllm": SimpleNamespace(LLM=None, SamplingParams=SimpleNamespace),
        "vllm.lora": SimpleNamespace(),
        "vllm.lora.request": SimpleNamespace(LoRARequest=None),
        "vllm.sampling_params": SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY=2)),
    }
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("lib.vllm_peer", "lib.vllm_rollout"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    vllm_rollout = importlib.import_module("lib.vllm_rollout")
    requests = make_requests(**SHAPE, equal_lengths=True, as_n=True)
    engine = Engine()
    llm = SimpleNamespace(llm_engine=engine)
    _, points, tokens = vllm_rollout.run_batch(llm, requests, ["first", "second"])
    assert tokens == sum(r.samples * r.tokens for r in requests)
    assert engine.loras == ["first", "second", "first", "second", "first"]
    assert points[-1].steps == max(r.tokens for r in requests)
    assert points[1].in_flight == sum(r.samples for r in requests if r.tokens > 1)
    assert points[-1].in_flight == 0
