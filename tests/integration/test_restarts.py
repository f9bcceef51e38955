"""Clients that outlive a server, which is killed and started again, or paused, in a rollout."""

import asyncio
import contextlib
import signal
import threading

import dorad
import dorad.aio
import pytest
from lib.server import command, serve, start, wait_until
from lib.tiers import deep

PROMPTS = 2000 if deep() else 48
TOKENS = 12
RUNNING = 4  # sequences at once
KILLS = 3
# Steps of a life that ends early. Three such lives are too short for the rollout, which takes
# PROMPTS * TOKENS / RUNNING steps or more; each is long enough for some answers.
STEPS = PROMPTS * TOKENS // RUNNING // (KILLS + 1)

SETTINGS = {
    "engine.threads": 1,
    "engine.kv_bytes": 64 << 20,
    "engine.max_running_sequences": RUNNING,
}


def todo():
    """A rollout of the base model and of an adapter. Its seeds are given: an answer that is
    generated again has to be the same."""
    return [
        dorad.GenerateRequest(
            [11, 12 + i % 40, 13 + i // 40],
            adapter=[None, "a"][i % 2],
            max_tokens=TOKENS,
            ignore_eos=True,
            seed=1000 + i,
            logprobs="raw",
        )
        for i in range(PROMPTS)
    ]


def bits(results):
    """Everything of the answers that has to be equal."""
    return [
        [
            (s.token_ids.tobytes(), s.logprobs.tobytes(), s.finish_reason, s.seed, s.spans)
            for s in samples
        ]
        for samples in results
    ]


@pytest.fixture(scope="module")
def adapters(zoo):
    return {"a": zoo.adapter("llama2", "dora")}


@pytest.fixture(scope="module")
def quiet(zoo, adapters):
    """The answers of a server that nothing happens to."""
    with serve(zoo.model("llama2"), adapters, SETTINGS) as server, dorad.Client(server.grpc) as it:
        return bits(it.generate_many(todo()))


def by_client(target, **options):
    with dorad.Client(target, timeout=280) as client:
        return client.generate_many(todo(), concurrency=32, **options)


def by_asyncio(target, **options):
    async def run():
        async with dorad.aio.Client(target, timeout=280) as client:
            return await client.generate_many(todo(), **options)

    return asyncio.run(run())


def by_pool(target, **options):
    with dorad.RolloutPool([target], timeout=280) as pool:
        return pool.generate_many(todo(), **options)


@pytest.mark.parametrize("rollout", [by_client, by_asyncio, by_pool])
def test_a_rollout_outlives_three_kills_and_its_answers_are_those_of_a_quiet_run(
    zoo, adapters, quiet, tmp_path_factory, rollout
):
    # A socket file: while the server is away, nobody else gets its address.
    scratch = tmp_path_factory.mktemp("restarts")
    target = f"unix:{scratch}/dorad.sock"
    settings = SETTINGS | {"server.grpc_listen": target}
    line = command(zoo.model("llama2"), adapters, settings)
    done, results = [], []

    def roll_out():
        results.extend(rollout(target, progress=lambda count, _: done.append(count)))

    with contextlib.ExitStack() as lives:
        worker = threading.Thread(target=roll_out)
        for life in range(KILLS + 1):
            point = {"DORAD_FAILPOINT": f"engine_step:{STEPS}"} if life < KILLS else {}
            server = start(line, scratch / f"{life}.log", **point)
            lives.callback(server.stop)
            lives.callback(server.wire.close)
            if life == 0:
                worker.start()
            if life < KILLS:
                assert server.process.wait(280) == -signal.SIGKILL
                assert len(done) < PROMPTS
        worker.join(280)
        assert bits(results) == quiet
        assert done == list(range(1, PROMPTS + 1))


def test_a_rollout_waits_for_the_end_of_a_pause(zoo, adapters, quiet):
    """As of an update of the weights that takes longer than a call's few attempts."""
    with (
        serve(zoo.model("llama2"), adapters, SETTINGS) as server,
        dorad.Client(server.grpc, timeout=280) as client,
    ):
        client.pause("wait")
        results = []
        worker = threading.Thread(
            target=lambda: results.extend(client.generate_many(todo(), concurrency=1))
        )
        worker.start()

        def refused():
            found = server.metrics().items()  # The series begins with the first refusal.
            return sum(count for name, count in found if 'reason="ENGINE_PAUSED"' in name)

        wait_until(lambda: refused() > 6, 120, what="more refusals than a call has attempts")
        client.resume()
        worker.join(280)
        assert bits(results) == quiet
