"""`dorad.ray.Fleet` on a Ray cluster of this host: placing, restarts, scaling, discovery."""

import asyncio
import os
import pathlib
import signal
import threading

import dorad
import dorad.ray
import pytest
import ray
from dorad import local_server
from dorad._ray.calls import ActorManifest
from dorad.fleet import manifest as m
from lib import grpo_example
from lib.ray_cluster import NODE, cluster
from lib.server import binary, device, wait_until

PROMPTS = [[3, 5, 7, 11 + i] for i in range(8)]
SETTINGS = {
    "engine.kv_bytes": 16 << 20,
    "engine.threads": 1,
    "server.drain_timeout_seconds": 20,
}


@pytest.fixture(scope="module", autouse=True)
def ray_cluster():
    with cluster():
        yield


@pytest.fixture
def spec(zoo, tmp_path):
    settings = SETTINGS | {"model.device": device()}
    return dict(
        model=zoo.model("slow"), settings=settings, program=binary(), folder=tmp_path / "fleet"
    )


@pytest.fixture
def fleet(spec):
    with dorad.ray.Fleet("fleet", **spec) as fleet:
        yield fleet
    dorad.ray.Fleet("fleet").shutdown()


@pytest.fixture
def folder(zoo):
    return zoo.adapter("slow", "dora_r64")


def labels(results):
    return {span.label for samples in results for sample in samples for span in sample.spans}


def all_ready(fleet, count):
    wait_until(
        lambda: [report.state for report in fleet.report()] == ["ready"] * count,
        what="every member",
    )


def restarted(fleet, number):
    def found():
        state = fleet.servers()[number]
        return state if state.state == "running" and state.reason else None

    return wait_until(found, what="the restart")


def active(target):
    with dorad.Client(target) as client:
        return [(v.label, v.digest) for v in client.adapters() if v.active]


def test_a_dead_server_a_dead_actor_and_a_dead_fleet_actor_come_back(fleet, folder):
    servers = fleet.scale(2)
    assert [s.state for s in servers] == ["running"] * 2
    assert all(s.target.startswith(f"{NODE}:") and "/metrics" in s.metrics_url for s in servers)
    assert sorted(fleet.manifest().members) == sorted(s.target for s in servers)
    version = fleet.publish("a", path=folder)

    os.kill(servers[0].pid, signal.SIGKILL)
    back = restarted(fleet, 0)
    assert back.restarts == 1 and "SIGKILL" in back.reason
    assert back.target != servers[0].target
    assert "server 0: the server was ended by SIGKILL" in pathlib.Path(back.log).read_text()

    child = servers[1].pid
    os.kill(parent(child), signal.SIGKILL)
    back = restarted(fleet, 1)
    assert "Ray has restarted the actor" in back.reason
    wait_until(lambda: not is_alive(child), what="the end of the actor's child")

    before = fleet.manifest()
    ray.kill(ray.get_actor("fleet", "dorad"), no_restart=False)
    assert fleet.manifest().adapters == before.adapters
    assert fleet.manifest().generation >= before.generation
    targets = [server.target for server in fleet.servers()]
    all_ready(fleet, 2)
    assert sorted(fleet.manifest().members) == sorted(targets)
    assert [active(target) for target in targets] == [[(version.label, version.digest)]] * 2
    assert labels(fleet.generate_many(PROMPTS, adapter="a", max_tokens=1)) == {"a@1"}
    assert fleet.publish("a", path=folder).label == "a@2"


def status(pid):
    """The state of a process and its parent."""
    state, parent = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    return state, int(parent)


def parent(pid):
    return status(pid)[1]


def is_alive(pid):
    try:
        return status(pid)[0] != "Z"
    except FileNotFoundError:
        return False


def test_it_scales_up_and_down_without_loss_of_prompts(fleet, folder):
    fleet.scale(1)
    fleet.publish("a", path=folder)
    servers = fleet.scale(3)
    assert [server.number for server in servers] == [0, 1, 2]
    all_ready(fleet, 3)
    assert all(active(server.target) == active(servers[0].target) for server in servers)
    results = []
    many = threading.Thread(
        target=lambda: results.extend(
            fleet.generate_many(PROMPTS, adapter="a", max_tokens=64, stop_token_ids=[])
        )
    )
    many.start()
    (left,) = fleet.scale(1)
    many.join(120)
    assert len(results) == len(PROMPTS) and labels(results) == {"a@1"}
    assert left.number == 0 and fleet.targets == [left.target]
    assert list(fleet.manifest().members) == [left.target]
    wait_until(lambda: ray.available_resources()["CPU"] == 7.0, what="the places of the others")


def test_others_find_it_by_its_name(fleet, spec, folder):
    fleet.scale(1)
    fleet.publish("a", path=folder)
    with pytest.raises(dorad.NotFound, match="no fleet 'other'"):
        dorad.ray.Fleet("other")
    with pytest.raises(ValueError, match="has other servers"):
        dorad.ray.Fleet("fleet", **spec | {"cpus": 2})
    with pytest.raises(ValueError, match="leave address out"):
        dorad.ray.Fleet("fleet", address="10.0.0.1:6379")
    with dorad.Fleet("ray:fleet") as plain:
        assert plain.manifest().members == fleet.manifest().members
    with dorad.ray.Fleet("fleet") as other:
        assert other.servers() == fleet.servers()

    @ray.remote(num_cpus=1)
    def sample(fleet):
        spans = fleet.generate_many(PROMPTS, adapter="a", max_tokens=1)[0][0].spans
        return [span.label for span in spans]

    assert ray.get(sample.remote(fleet)) == ["a@1"]


def test_servers_that_cannot_run_are_taken_back_with_the_reason(fleet, spec, tmp_path):
    fleet.scale(1)
    # A fast one may have started within that time.
    with pytest.raises(dorad.PoolError, match=r"it needs \{'CPU': 1\}") as caught:
        fleet.scale(20, timeout=0.5)
    assert f"{len(fleet.servers())} of 20 servers" in str(caught.value)
    bad = dorad.ray.Fleet("bad", **spec | {"model": tmp_path / "none", "folder": tmp_path / "bad"})
    with pytest.raises(dorad.PoolError, match=r"0 of 1 servers .*(\n.*)*did not start.*log ends"):
        bad.scale(1)
    assert bad.servers() == []
    bad.shutdown()


def test_a_server_that_dies_again_and_again_has_failed_and_scale_replaces_it(spec):
    fleet = dorad.ray.Fleet("fleet", **spec | {"max_restarts": 1})
    try:
        (server,) = fleet.scale(1)
        os.kill(server.pid, signal.SIGKILL)
        os.kill(restarted(fleet, 0).pid, signal.SIGKILL)
        failed = wait_until(
            lambda: [s for s in fleet.servers() if s.state == "failed"], what="the failure"
        )
        assert "SIGKILL" in failed[0].reason
        (again,) = fleet.scale(1)
        assert again.state == "running" and again.restarts == 0
        assert list(fleet.manifest().members) == [again.target]
    finally:
        fleet.shutdown()


def test_of_racing_changes_of_the_manifest_exactly_one_wins(fleet):
    store = ActorManifest(ray.get_actor("fleet", "dorad"))

    async def race(round):
        now = await store.read()
        changed = [m.renew(now, [f"10.0.{round}.{n}:1"], 1e12) for n in range(8)]
        won = await asyncio.gather(*(store.compare_and_set(now.generation, c) for c in changed))
        assert sum(won) == 1
        assert (await store.read()) == changed[won.index(True)]

    async def races():
        for round in range(5):
            await race(round)

    fleet.close()  # It would change the manifest, too.
    asyncio.run(races())
    asyncio.run(clear(store))


def test_a_change_whose_answer_is_lost_is_found_again(fleet):
    """The actor dies after it has written the manifest, or before."""

    async def change(number, dies_first):
        actor = ray.get_actor("fleet", "dorad")
        store = ActorManifest(actor)
        now = await store.read()
        changed = m.renew(now, [f"10.0.0.{number}:1"], 1e12)
        call = FirstAnswerLost(actor, dies_first)
        assert await ActorManifest(call).compare_and_set(now.generation, changed)
        assert await store.read() == changed
        lost = FirstAnswerLost(actor, True)
        with pytest.raises(dorad.Unavailable):  # The first generation is long gone.
            await ActorManifest(lost).compare_and_set(now.generation, changed_otherwise(now))

    def changed_otherwise(manifest):
        return m.renew(manifest, ["10.0.0.99:1"], 1e12)

    fleet.close()
    asyncio.run(change(1, dies_first=False))
    asyncio.run(change(2, dies_first=True))
    asyncio.run(clear(ActorManifest(ray.get_actor("fleet", "dorad"))))


class FirstAnswerLost:
    """An actor that dies in the first call of compare_and_set."""

    def __init__(self, actor, dies_first):
        self._actor, self._dies_first, self._died = actor, dies_first, False
        self.read = actor.read
        self.compare_and_set = self

    def remote(self, *arguments):
        real = self._actor.compare_and_set
        if self._died:
            return real.remote(*arguments)
        self._died = True
        if not self._dies_first:
            assert ray.get(real.remote(*arguments))
        ray.kill(self._actor, no_restart=False)

        async def lost():
            raise ray.exceptions.ActorUnavailableError("it has died", None)

        return lost()


async def clear(store):
    now = await store.read()
    assert await store.compare_and_set(now.generation, m.Manifest(now.generation + 1))


def test_grpo_over_three_servers_one_of_which_dies_is_as_over_one(zoo, spec, tmp_path, monkeypatch):
    """Rewards, tokens and log-probabilities, to the last bit."""
    spec |= {"model": grpo_example.make_model(zoo, tmp_path / "model")}
    settings = spec["settings"] | {"model.device": "cpu", "model.compute_dtype": "fp32"}
    with grpo_example.loaded() as grpo:
        sample_groups, drawn = grpo.sample_groups, []

        def recorded(*arguments, **options):
            for group in sample_groups(*arguments, **options):
                answers = [(s.token_ids.tolist(), s.logprobs.tolist()) for s in group.samples]
                drawn.append((group.prompt, answers, group.rewards.tolist()))
                yield group

        monkeypatch.setattr(grpo, "sample_groups", recorded)
        alone_at = local_server(spec["model"], settings, program=binary())
        with alone_at as target, dorad.Client(target) as client:
            alone = grpo.run(client, spec["model"], steps=4, seed=3)
        expected = drawn.copy()
        drawn.clear()

        with dorad.ray.Fleet("grpo", **spec | {"settings": settings}) as fleet:
            servers = fleet.scale(3)
            all_ready(fleet, 3)
            generate_many, calls = fleet.generate_many, []

            def while_one_dies(requests, **options):
                calls.append(len(requests))
                if len(calls) != 2:
                    return generate_many(requests, **options)
                dying = iter([servers[1].pid])

                def kill(done, total):  # After the first prompt, in the midst of the others.
                    for pid in dying:
                        os.kill(pid, signal.SIGKILL)

                return generate_many(requests, progress=kill, **options)

            monkeypatch.setattr(fleet, "generate_many", while_one_dies)
            many = grpo.run(fleet, spec["model"], steps=4, seed=3)
            assert "SIGKILL" in restarted(fleet, 1).reason
            all_ready(fleet, 3)
            states = fleet.servers()
            assert len({str(active(state.target)) for state in states}) == 1
            assert sum(report.completed > 0 for report in fleet.report()) >= 2
            fleet.shutdown()
    assert drawn == expected
    assert [step.reward for step in many] == [step.reward for step in alone]
    assert [step.version for step in many] == [f"policy@{n}" for n in range(1, 5)]
