"""What generate_many has when one of its prompts fails: everything that had finished."""

import asyncio
import pickle
import threading

import dorad
import dorad.aio
import pytest
from fake_server import FakeServer
from lib.server import wait_until

NOTHING = []  # The server refuses it.


class Selective(FakeServer):
    """Prompts above 100 never end."""

    def _tokens(self, request, context):
        prompt = int.from_bytes(request.prompt_token_ids[:4], "little")
        while prompt > 100 and context.is_active():
            threading.Event().wait(0.005)
        # The refused prompt waits until the caller has the others' results.
        wait_until(lambda: prompt or self.finished >= 3)
        yield from super()._tokens(request, context)

    finished = 0

    def progress(self, done, total):
        self.finished = done


@pytest.fixture
def server():
    with Selective() as fake:
        yield fake


def many(target, kind, prompts, **options):
    if kind == "client":
        with dorad.Client(target) as client:
            return client.generate_many(prompts, **options)
    if kind == "pool":
        with dorad.RolloutPool([target]) as pool:
            return pool.generate_many(prompts, **options)

    async def run():
        async with dorad.aio.Client(target) as client:
            return await client.generate_many(prompts, **options)

    return asyncio.run(run())


KINDS = ["client", "asyncio", "pool"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_carries_what_had_finished(server, kind):
    prompts = [[1], [200], NOTHING, [2], [3], [201]]
    with pytest.raises(dorad.InvalidArgument) as caught:
        many(server.target, kind, prompts, max_tokens=1, progress=server.progress)
    results = caught.value.results
    assert [r if r is None else r[0].token_ids.tolist() for r in results[:2]] == [[1], None]
    assert results[2] is caught.value
    assert [r[0].token_ids.tolist() for r in results[3:5]] == [[2], [3]] and results[5] is None
    wait_until(lambda: server.running == 0)


@pytest.mark.parametrize("kind", KINDS)
def test_with_errors_returned_every_other_prompt_finishes(server, kind):
    prompts = [[1], NOTHING, [2], [3]]
    options = dict(return_errors=True, max_tokens=1, progress=server.progress)
    results = many(server.target, kind, prompts, **options)
    assert isinstance(results.pop(1), dorad.InvalidArgument)
    assert [r[0].token_ids.tolist() for r in results] == [[1], [2], [3]]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_the_callers_own_progress_carries_them_as_well(server, kind):
    def progress(done, total):
        if done == 3:
            raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        many(server.target, kind, [[1], [200], [2], [3]], max_tokens=1, progress=progress)
    results = caught.value.results
    assert results.pop(1) is None
    assert [r[0].token_ids.tolist() for r in results] == [[1], [2], [3]]


def test_an_error_with_results_can_be_pickled(server):
    with pytest.raises(dorad.InvalidArgument) as caught:
        prompts = [[1], [2], [3], NOTHING]
        many(server.target, "client", prompts, max_tokens=1, progress=server.progress)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is dorad.InvalidArgument and copy.results[3] is copy
    assert copy.results[1][0].token_ids.tolist() == [2] and copy.violations


def test_other_calls_have_no_results(server):
    with dorad.Client(server.target) as client:
        server.finished = 3
        with pytest.raises(dorad.InvalidArgument) as caught:
            client.generate(NOTHING)
        assert caught.value.results is None
