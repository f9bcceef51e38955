"""dorad.verl with `engine_kwargs.dorad_answers`: its server's seeds and drafts.

Against the fake server; what the module takes from verl is a stand-in.
"""

import asyncio
import importlib
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

A, B = [3, 4], [5, 6, 7]
CONFIG = dict(
    engine_kwargs={"dorad_answers": True},
    full_determinism=False,
    repetition_penalty=1.0,
    ignore_eos=False,
    prompt_length=8,
    response_length=4,
    seed=42,
)


@pytest.fixture
def made(server, monkeypatch, folder):
    """Makes the server's object with changes of the configuration."""
    parts = {
        "verl": {},
        "verl.utils": {},
        "verl.utils.config": {"omega_conf_to_dataclass": lambda config, **_: config},
        "verl.workers": {},
        "verl.workers.config": {"HFModelConfig": None},
        "verl.workers.rollout": {},
        "verl.workers.rollout.replica": {"TokenOutput": SimpleNamespace},
    }
    for name, values in parts.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "dorad._verl.server", raising=False)
    server_class = importlib.import_module("dorad._verl.server").Server
    monkeypatch.delitem(sys.modules, "dorad._verl.server")
    monkeypatch.setattr(server_class, "_start", lambda self: server.target)
    monkeypatch.setattr("fake_server.inference.CONTEXT_LENGTH", 64)

    def make(rank=0, **changes):
        config = SimpleNamespace(**CONFIG | changes)
        model = SimpleNamespace(processor=None, hf_config=None)
        it = server_class(config, model, None, rank)
        it.folder = folder
        return it

    return make


async def policy(it, step):
    """As verl's update of the weights."""
    await it.set_policy(await it._client.publish("policy", path=it.folder, keep_last=0), step)


async def several(it, *prompts, **params):
    answers = await asyncio.gather(
        *(
            it.generate(prompt, {"temperature": 0.7} | params, f"id-{i}")
            for i, prompt in enumerate(prompts)
        )
    )
    return [answer.token_ids for answer in answers]


def sent(server):
    """By prompt the requests since the last time: seeds, and their drafts."""
    found = {}
    for call in server.generate_calls:
        drafts = [np.frombuffer(d.token_ids, "<i4").tolist() for d in call.drafts]
        prompt = tuple(np.frombuffer(call.prompt_token_ids, "<i4").tolist())
        seed = call.sampling.seed if call.sampling.HasField("seed") else None
        found.setdefault(prompt, []).append((seed, drafts))
    server.generate_calls.clear()
    return found


def seeds(requests):
    return {seed for seed, _ in requests}


def run(work):
    asyncio.run(work())


def test_samples_of_a_prompt_that_comes_again_have_its_seeds_and_last_answers(server, made):
    async def work():
        it = made()
        await it.launch_server()
        await policy(it, 0)
        tokens = await several(it, A, B, A, B, A)
        first = sent(server)
        assert [len(seeds(requests)) for requests in (first[tuple(A)], first[tuple(B)])] == [3, 2]
        await policy(it, 1)
        again = await several(it, B, A, A)
        second = sent(server)
        assert seeds(second[tuple(A)]) < seeds(first[tuple(A)]) and len(second[tuple(A)]) == 2
        assert seeds(second[tuple(B)]) < seeds(first[tuple(B)]) and len(second[tuple(B)]) == 1
        assert {str(d) for _, d in second[tuple(A)]} == {str([tokens[0]])}
        assert again == [tokens[1], tokens[0], tokens[0]]

    run(work)


def test_without_the_setting_seeds_are_random_and_nothing_is_kept(server, made):
    async def work():
        it = made(engine_kwargs={"vllm": {}})
        await it.launch_server()
        for step in 0, 1:
            await policy(it, step)
            await several(it, A, A)
            assert sent(server) == {tuple(A): [(None, []), (None, [])]}

    run(work)


def test_full_determinism_has_other_seeds_at_every_step_and_request(server, made):
    async def work():
        drawn = []
        for seed in 42, 43:
            it = made(engine_kwargs={}, full_determinism=True, seed=seed)
            await it.launch_server()
            for step in 0, 1, 1:
                await policy(it, step)
                await several(it, A, A)
                drawn.append(seeds(sent(server)[tuple(A)]))
        assert drawn[1] == drawn[2] and drawn[4] == drawn[5]
        assert len(set.union(*drawn)) == 8

    run(work)


def test_each_replica_and_base_seed_draws_its_own(server, made):
    async def work():
        drawn = set()
        for it in made(), made(rank=1), made(seed=43):
            await it.launch_server()
            await policy(it, 0)
            await several(it, A)
            drawn |= seeds(sent(server)[tuple(A)])
        assert len(drawn) == 3

    run(work)


@pytest.mark.parametrize("how", ["abort", "in flight"])
def test_a_policy_that_comes_among_samples_of_a_prompt_gives_them_no_seed_twice(server, made, how):
    """Else they would be nearly the same."""

    async def work():
        it = made()
        await it.launch_server()
        await policy(it, 0)
        if how == "abort":
            await several(it, A)
            await it.abort_all_requests()
            await policy(it, 1)
            await it.resume_generation()
        else:
            server.token_delay = 0.1
            running = asyncio.create_task(several(it, A))
            while not server.running:
                await asyncio.sleep(0.01)
            await policy(it, 1)
            await running
        await several(it, A)
        assert len(seeds(sent(server)[tuple(A)])) == 2

    run(work)


def test_seeds_of_an_agent_loop_and_greedy_requests_stay(server, made):
    async def work():
        it = made()
        await it.launch_server()
        drafts = []
        for step in 0, 1:
            await policy(it, step)
            tokens = await several(it, A, seed=5) + await several(it, B, temperature=0)
            found = sent(server)
            assert seeds(found[tuple(A)]) == {5}
            drafts = [found[tuple(prompt)][0][1] for prompt in (A, B)]
        assert drafts == [[tokens[0]], [tokens[1]]]

    run(work)
