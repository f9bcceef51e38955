"""Publishing to many members over a simulated network: the bytes of the source, and the time."""

import asyncio

import pytest
from dorad.errors import PoolError
from dorad.fleet import manifest as m
from lib.fleet_simulation import Network, Process, Store, digest_of, files_of, now, run
from lib.tiers import deep

SIZE = (2 << 30) if deep() else (512 << 20)


async def fleet(count):
    network = Network([f"t{n}" for n in range(count)])
    process = Process(network, Store(), lease=600.0)
    await process.coordinator.join(network.servers)
    return network, process


def active(network, name="a"):
    return {target: server.disk.active.get(name) for target, server in network.servers.items()}


@pytest.mark.parametrize("count", [1, 2, 3, 64, 1024])
def test_the_source_sends_an_adapter_at_most_twice(count, figures):
    files = files_of("content", SIZE)

    async def main():
        network, process = await fleet(count)
        began = now()
        outcome = await process.coordinator.publish("a", files)
        relayed = now() - began
        assert not outcome.behind
        assert set(active(network).values()) == {1}
        assert outcome.release.digest == digest_of(files)
        assert network.source.sent == min(2, count) * SIZE
        assert max(server.up.sent for server in network.servers.values()) <= 2 * SIZE
        return relayed

    relayed = run(main())
    alone = count * SIZE / Network().source.rate
    figures.append(
        f"fleet of {count}, {SIZE >> 20} MiB at 25 Gb/s (simulated): {relayed:.2f} s,"
        f" the bytes alone to each one after the other {alone:.2f} s"
    )


def test_dead_members_cost_neither_the_publish_nor_the_source():
    files = files_of("content", SIZE)

    async def main():
        network, process = await fleet(64)
        dead = [f"t{n}" for n in range(0, 64, 6)]
        for target in dead:
            network.servers[target].kill()
        outcome = await process.coordinator.publish("a", files)
        assert set(outcome.behind) == set(dead)
        assert [t for t, version in active(network).items() if version != 1] == dead
        assert network.source.sent == 2 * SIZE

    run(main())


def test_relays_that_die_in_the_middle_cost_the_source_no_more_than_what_they_held():
    files = files_of("content", SIZE)

    async def main():
        network, process = await fleet(64)
        publishing = asyncio.ensure_future(process.coordinator.publish("a", files))
        dead = ["t0", "t3", "t8", "t20"]
        for target in dead:
            while network.servers[target].up.sent < SIZE // 4:
                await asyncio.sleep(0.001)
            network.servers[target].kill()
        outcome = await publishing
        assert set(outcome.behind) == set(dead)
        assert network.source.sent <= 2 * SIZE + (64 << 20)

    run(main())


def test_half_of_the_members_are_too_few():
    async def main():
        network, process = await fleet(4)
        for target in ("t0", "t3"):
            network.servers[target].kill()
        with pytest.raises(PoolError, match="on 2 of 4 members"):
            await process.coordinator.publish("a", files_of("content"))
        assert set(active(network).values()) == {None}
        assert not any(server.disk.versions for server in network.servers.values())
        network.servers["t0"].start()
        outcome = await process.coordinator.publish("a", files_of("content"))
        assert outcome.release.version == 2

    run(main())


def test_a_returned_member_gets_the_fleets_version_from_another_one():
    files = files_of("content", SIZE)

    async def main():
        network, process = await fleet(6)
        network.servers["t2"].kill()
        await process.coordinator.publish("a", files, {"durable": True})
        sent = network.source.sent
        assert (await process.coordinator.tend())["t2"] is not None
        network.servers["t2"].start()
        assert (await process.coordinator.tend())["t2"] is None
        assert active(network)["t2"] == 1
        assert network.source.sent == sent

    run(main())


def test_members_that_compute_differently_prevent_the_publish(monkeypatch):
    async def main():
        network, process = await fleet(3)
        fetch = network.fetch

        async def another_model(target, *args):
            return "0" * 64 if target == "t2" else await fetch(target, *args)

        monkeypatch.setattr(network, "fetch", another_model)
        monkeypatch.setattr(network, "send", _wrong(network.send, "t2"))
        with pytest.raises(PoolError, match="compute differently"):
            await process.coordinator.publish("a", files_of("content"))
        assert set(active(network).values()) == {None}

    def _wrong(send, of):
        async def sent(target, *args):
            digest = await send(target, *args)
            return "0" * 64 if target == of else digest

        return sent

    run(main())


def test_a_coordinator_that_slept_too_long_learns_that_another_one_has_decided():
    async def main():
        store = Store()
        network = Network(["t0", "t1"])
        slow, quick = (Process(network, store, lease=1.0, name=n).coordinator for n in "sq")
        await slow.join(network.servers)
        network.source.rate = 1e6  # 16 s
        publishing = asyncio.ensure_future(slow.publish("a", files_of("content")))
        await asyncio.sleep(0.5)
        # As if it were stopped: its lease ends without being prolonged.
        held = store.newest.adapters["a"].prepared
        stolen = m.take_over(store.newest, "a", 1, "q", held.until, held.until + 100)
        assert await store.compare_and_set(store.newest.generation, stolen)
        with pytest.raises(m.Lost, match="taken over by q"):
            await publishing
        assert store.newest.adapters["a"].prepared.coordinator == "q"
        await asyncio.sleep(200)
        await quick.recover()
        assert store.newest.adapters["a"].prepared is None

    run(main())


def test_a_commit_whose_answer_is_lost_stays():
    class Fragile(Store):
        async def compare_and_set(self, expected, manifest):
            done = await super().compare_and_set(expected, manifest)
            if done and manifest.committed():
                raise OSError("the answer is lost")
            return done

    async def main():
        network, store = Network(["t0", "t1"]), Fragile()
        coordinator = Process(network, store).coordinator
        await coordinator.join(network.servers)
        with pytest.raises(OSError, match="the answer is lost"):
            await coordinator.publish("a", files_of("content"))
        assert store.newest.committed()["a"].version == 1
        assert all(server.disk.versions["a", 1].ready for server in network.servers.values())

    run(main())
