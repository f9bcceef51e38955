"""Clients and pools in other processes: pickled they connect there, after fork() they say what to
do."""

import asyncio
import concurrent.futures
import multiprocessing
import operator
import os
import pickle
import subprocess
import sys

import dorad
import dorad.aio
import grpc
import pytest
from fake_server import FakeServer
from lib.server import wait_until

PROMPTS = [[1], [2], [3]]
ROLLOUT = operator.methodcaller("generate_many", PROMPTS, max_tokens=1)


def tokens(results):
    return [samples[0].token_ids.tolist() for samples in results]


def copy_of(it):
    return pickle.loads(pickle.dumps(it))


def test_clients_and_pools_work_in_processes_that_they_are_sent_to(server):
    spawned = multiprocessing.get_context("spawn")
    with (
        concurrent.futures.ProcessPoolExecutor(1, spawned) as workers,
        dorad.Client(server.target, timeout=60) as client,
        dorad.RolloutPool([server.target], timeout=60) as pool,
    ):
        for it in (client, pool):
            assert tokens(workers.submit(ROLLOUT, it).result(120)) == PROMPTS


def test_a_pickled_client_has_the_same_arguments_and_a_connection_of_its_own(server):
    given = {"timeout": 7.0, "retry_for": 3.0, "token": "t", "metadata": (("k", "v"),)}
    with dorad.Client(server.target, admin_target=server.target, **given) as client:
        copy = copy_of(client)
    with copy:
        copy.generate([1], max_tokens=1)
        assert (copy.target, copy._timeout, copy._retry_for) == (server.target, 7.0, 3.0)
        sent = server.metadata[-1]
        assert sent["k"] == "v" and sent["authorization"] == "Bearer t"
        assert copy.info().model.name == "fake-model"


def test_the_environment_is_the_other_sides(server, monkeypatch):
    monkeypatch.setenv("DORAD_TOKEN", "here")
    with dorad.Client(server.target) as client:
        pickled = pickle.dumps(client)
    monkeypatch.setenv("DORAD_TOKEN", "there")
    with pickle.loads(pickled) as copy:
        copy.generate([1], max_tokens=1)
    assert server.metadata[-1]["authorization"] == "Bearer there" and b"here" not in pickled


def test_a_client_with_other_metadata_keeps_it_and_nothing_else(server, monkeypatch):
    monkeypatch.setenv("DORAD_TOKEN", "t")
    with (
        dorad.Client(server.target, metadata=[("k", "v")]) as client,
        copy_of(client.with_metadata([("own", "w")])) as copy,
    ):
        copy.generate([1], max_tokens=1)
    assert server.metadata[-1]["own"] == "w"
    assert not {"k", "authorization"} & server.metadata[-1].keys()


def test_a_pickled_pool_has_the_targets_of_now(server):
    with FakeServer() as second, dorad.RolloutPool([server.target]) as pool:
        pool.add(second.target)
        pool.remove(server.target)
        with copy_of(pool) as copy:
            assert copy.targets == [second.target]
            assert tokens(ROLLOUT(copy)) == PROMPTS


def test_asyncio_clients_and_pools_are_unpickled_inside_a_coroutine(server):
    async def made():
        async with (
            dorad.aio.Client(server.target) as client,
            dorad.aio.RolloutPool([server.target]) as pool,
        ):
            return pickle.dumps(client), pickle.dumps(pool)

    async def used(pickled):
        async with pickle.loads(pickled) as it:
            return tokens(await ROLLOUT(it))

    for pickled in asyncio.run(made()):
        assert asyncio.run(used(pickled)) == PROMPTS
        with pytest.raises(RuntimeError, match="inside a coroutine"):
            pickle.loads(pickled)


def test_credentials_that_cannot_be_pickled_are_named(server):
    with (
        dorad.Client(server.target, credentials=grpc.ssl_channel_credentials()) as client,
        pytest.raises(TypeError, match="credentials="),
    ):
        pickle.dumps(client)


FORK = """
import asyncio, os, sys, threading
import dorad, dorad.aio

target = sys.argv[1]
client, pool = dorad.Client(target), dorad.RolloutPool([target])
stream = client.stream([1], max_tokens=5)
next(stream)
running = threading.Thread(target=lambda: client.generate([1]), daemon=True)
running.start()


async def asynchronous():
    async with dorad.aio.Client(target) as it:
        await it.info()
        return it


left = asyncio.run(asynchronous())
sys.stdin.readline()  # Now the call of the thread runs.

child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

CALLS = {
    "client": lambda: client.info(),
    "many": lambda: client.generate_many([[1]]),
    "with_metadata": lambda: client.with_metadata([]).score([[1]]),
    "begun stream": lambda: next(stream),
    "pool": lambda: pool.generate_many([[1]]),
    "report": lambda: pool.report(),
    "asyncio": lambda: asyncio.run(left.info()),
}
for name, call in CALLS.items():
    try:
        call()
    except RuntimeError as error:
        print(name, error, flush=True)
stream.close()
client.close()
pool.close()
with dorad.Client(target) as own:
    print("own", own.info(timeout=60).model.name, flush=True)
os._exit(0)
"""


def test_after_fork_every_use_says_what_to_do_and_closing_does_nothing(server):
    """With a call of the parent's in flight: there gRPC's own calls would hang."""
    server.endless, server.token_delay = True, 0.01
    with subprocess.Popen(
        [sys.executable, "-c", FORK, server.target],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "GRPC_VERBOSITY": "NONE"},
        text=True,
    ) as parent:
        wait_until(lambda: server.running == 2, 60)
        out, _ = parent.communicate("\n", 120)
    assert parent.returncode == 0
    *refused, own = out.splitlines()
    assert [line.partition(" ")[0] for line in refused] == [
        "client", "many", "with_metadata", "begun", "pool", "report", "asyncio",
    ]  # fmt: skip
    assert all("made before fork()" in line and "pickled" in line for line in refused)
    assert own == "own fake-model"
