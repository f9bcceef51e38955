"""dorad.tinker with `answers`, against the fake server; tinker's types are stand-ins."""

import asyncio
import importlib
import sys
from types import ModuleType, SimpleNamespace

import dorad.aio
import numpy as np
import pytest

PROMPT = SimpleNamespace(to_ints=lambda: [3, 4])


@pytest.fixture
def bridge(monkeypatch):
    tinker = ModuleType("tinker")
    for name in ("ModelInput", "SamplingParams", "SampleResponse", "SampledSequence"):
        setattr(tinker, name, SimpleNamespace)
    monkeypatch.setitem(sys.modules, "tinker", tinker)
    monkeypatch.delitem(sys.modules, "dorad.tinker", raising=False)
    yield importlib.import_module("dorad.tinker")
    monkeypatch.delitem(sys.modules, "dorad.tinker")


def params(**changes):
    values = dict(max_tokens=3, temperature=0.7, top_p=1.0, top_k=-1, seed=5, stop=None)
    return SimpleNamespace(**values | changes)


def sampled(server, bridge, answers, *calls):
    """Of each call, the tokens."""

    async def run():
        async with dorad.aio.Client(server.target, timeout=20) as client:
            sampler = bridge.SamplingClient(client, answers=answers)
            return [await sampler.sample(PROMPT, 2, each) for each in calls]

    server.generate_calls.clear()
    return [[s.tokens_np.tolist() for s in r.sequences] for r in asyncio.run(run())]


def sent(server):
    """Of each request, its seed and its drafts."""
    return [
        (
            call.sampling.seed if call.sampling.HasField("seed") else None,
            [np.frombuffer(d.token_ids, "<i4").tolist() for d in call.drafts],
        )
        for call in server.generate_calls
    ]


def test_answers_to_a_seed_are_drafts_when_it_comes_again(server, bridge):
    answers = dorad.Answers()
    first = sampled(server, bridge, answers, params(), params(seed=6))
    assert sent(server) == [(5, []), (6, [])]
    again = sampled(server, bridge, answers, params(max_tokens=9), params(seed=7))
    assert sent(server) == [(5, first[0]), (7, [])]
    assert again == sampled(server, bridge, None, params(max_tokens=9), params(seed=7))
    assert sent(server) == [(5, []), (7, [])]


def test_greedy_samples_need_no_seed(server, bridge):
    greedy = params(temperature=0, seed=None)
    answers = dorad.Answers()
    (first,) = sampled(server, bridge, answers, greedy)
    sampled(server, bridge, answers, greedy)
    assert sent(server) == [(None, first)]


def test_others_without_a_seed_are_refused(server, bridge):
    with pytest.raises(ValueError, match="seed"):
        sampled(server, bridge, dorad.Answers(), params(seed=None))
    assert not server.generate_calls
    sampled(server, bridge, None, params(seed=None))
    assert sent(server) == [(None, [])]
