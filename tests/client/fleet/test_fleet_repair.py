"""Members that have lost versions, over a simulated network."""

import asyncio
import itertools

import pytest
from dorad.errors import DoradError, PoolError
from dorad.fleet.coordinator import KEEPER_SECONDS
from lib import fleet_simulation
from lib.fleet_simulation import Disk, Network, Process, Store, files_of, now, run

LEASE = 6.0


async def fleet(count):
    network = Network([f"t{n}" for n in range(count)])
    process = Process(network, Store(), lease=LEASE)
    await process.coordinator.join(network.servers)

    async def tend():
        while True:
            await process.coordinator.tend()
            await asyncio.sleep(1.0)

    process.start(tend())
    return network, process


def lose_all(network, *targets):
    """They restart without their disks."""
    for target in targets:
        network.servers[target].kill()
        network.servers[target].disk = Disk()
        network.servers[target].start()


def active(network, target):
    return network.servers[target].disk.active.get("a")


def test_members_that_lack_a_version_are_not_asked_for_it(monkeypatch):
    monkeypatch.setattr(fleet_simulation, "PEER_PATIENCE", 30.0)  # As servers wait for an arrival.

    async def main():
        network, process = await fleet(8)
        await process.coordinator.publish("a", files_of("content"), {"durable": True})
        lose_all(network, *[f"t{n}" for n in range(1, 8)])
        began = now()
        while {active(network, target) for target in network.servers} != {1}:
            assert now() - began < 5.0
            await asyncio.sleep(0.01)
        await process.crash()

    run(main())


def test_keepers_that_take_turns_do_not_undo_each_others_loads(monkeypatch):
    """As where processes stand still for seconds, and a load takes longer than a keeper stays."""
    monkeypatch.setattr(fleet_simulation, "LOAD_SECONDS", 8.0)

    async def main():
        network, store = Network(["t0", "t1"]), Store()
        keepers = [Process(network, store, lease=60.0) for _ in range(4)]
        first = keepers[0].coordinator
        await first.join(network.servers)
        await first.publish("a", files_of("content"), {"durable": True})
        lose_all(network, "t1")
        began = now()
        for keeper in itertools.cycle(keepers):
            await keeper.coordinator.tend()
            if active(network, "t1") == 1:
                break
            assert now() - began < 15.0
            await asyncio.sleep(KEEPER_SECONDS + 0.5)
        for keeper in keepers:
            await keeper.crash()

    run(main())


def test_a_version_that_nobody_has_kept_comes_with_the_next_publish():
    async def main():
        network, process = await fleet(3)
        coordinator = process.coordinator
        await coordinator.publish("a", files_of("first"), {"durable": False})
        lose_all(network, "t2")
        await asyncio.sleep(3 * LEASE)
        assert active(network, "t2") is None
        try:
            await coordinator.reconcile("t2")
        except DoradError as error:
            assert "no member has kept the files of a@1" in error.message
        outcome = await coordinator.publish("a", files_of("second"), {"durable": False})
        assert outcome.active.keys() == {"t0", "t1", "t2"}
        assert {active(network, target) for target in network.servers} == {2}
        await process.crash()

    run(main())


def test_a_member_that_leaves_hands_on_what_it_alone_has():
    async def main():
        network, process = await fleet(3)
        await process.coordinator.publish("a", files_of("content"), {"durable": True})
        lose_all(network, "t1", "t2")
        await process.coordinator.leave("t0")
        network.servers.pop("t0").kill()
        await asyncio.sleep(5.0)
        assert [active(network, target) for target in network.servers] == [1, 1]
        assert list((await process.store.read()).members) == ["t1", "t2"]
        await process.crash()

    run(main())


def test_the_only_holder_of_a_version_that_cannot_travel_stays():
    async def main():
        network, process = await fleet(2)
        coordinator = process.coordinator
        await coordinator.publish("a", files_of("content"), {"durable": False})
        lose_all(network, "t1")
        with pytest.raises(PoolError, match=r"a@1: .* no member has kept its files"):
            await coordinator.leave("t0")
        await coordinator.leave("t1")  # It has nothing.
        with pytest.raises(PoolError, match=r"a@1: .* no member has kept"):
            await coordinator.leave("t0")
        await coordinator.leave("t0", force=True)
        assert (await process.store.read()).members == {}
        await process.crash()

    run(main())


def test_of_two_holders_that_leave_at_the_same_time_one_stays():
    async def main():
        network, process = await fleet(2)
        other = Process(network, process.store, lease=LEASE)
        await process.coordinator.publish("a", files_of("content"), {"durable": True})
        leaving = [process.coordinator.leave("t0"), other.coordinator.leave("t1")]
        ended = await asyncio.gather(*leaving, return_exceptions=True)
        assert sorted(map(type, ended), key=str) == [type(None), PoolError]
        assert len((await process.store.read()).members) == 1
        await other.crash()
        await process.crash()

    run(main())


def test_a_member_leaves_while_another_one_is_silent_and_leases_are_renewed():
    async def main():
        network, process = await fleet(4)
        await process.coordinator.publish("a", files_of("content"), {"durable": True})
        network.servers["t3"].cut_off = True
        held = network.held

        async def slowly(target, name):
            if target == "t3":
                await asyncio.sleep(1.0)  # Until a call to it fails.
            return await held(target, name)

        network.held = slowly
        other = Process(network, process.store, lease=0.5)

        async def renew():
            while True:
                await other.coordinator.join(["t1"])
                await asyncio.sleep(0.05)

        other.start(renew())
        async with asyncio.timeout(30):
            await process.coordinator.leave("t0")
        assert "t0" not in (await process.store.read()).members
        await other.crash()
        await process.crash()

    run(main())
