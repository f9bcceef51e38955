"""The manifest: its changes, its text, and the file that keeps it."""

import asyncio
import functools
import multiprocessing
import os
import subprocess
import sys

import pytest
from dorad.fleet import manifest as m
from dorad.fleet.manifest_store import ManifestFile, change

FILES = m.Files("a" * 64, "b" * 64, 7)


def prepared(version, coordinator="one", until=10.0):
    release = m.Release(version, FILES, f"upload-{version}", {"durable": True})
    return m.Prepared(release, coordinator, until)


@pytest.fixture
def manifest():
    return m.prepare(m.renew(m.Manifest(), ["x", "y"], 5.0), "a", prepared(1))


def test_each_change_has_the_next_generation(manifest):
    assert manifest.generation == 2
    assert m.commit(manifest, "a", 1, "one", "d").generation == 3


def test_a_version_is_the_fleets_after_its_commit_only(manifest):
    assert manifest.committed() == {}
    assert manifest.pinned("a") == "a"
    done = m.commit(manifest, "a", 1, "one", "d" * 64)
    assert done.committed()["a"].version == 1
    assert done.pinned("a") == "a@1:" + "d" * 64
    assert done.pinned("a@7") == "a@7"
    assert done.pinned("b") == "b"


def test_a_second_publish_of_the_same_name_learns_of_the_first(manifest):
    with pytest.raises(m.Lost, match=r"a@1 is being published by one"):
        m.prepare(manifest, "a", prepared(2, "two"))
    assert m.prepare(manifest, "b", prepared(1, "two")).adapters["b"].prepared is not None


def test_a_number_never_returns(manifest):
    undone = m.abort(manifest, "a", 1, "one")
    with pytest.raises(m.Lost, match="is taken"):
        m.prepare(undone, "a", prepared(1))
    again = m.commit(m.prepare(undone, "a", prepared(2)), "a", 2, "one", "d")
    gone = m.retire(again, "a", 2)
    assert gone.committed() == {}
    with pytest.raises(m.Lost, match="is taken"):
        m.prepare(gone, "a", prepared(2))


def test_only_the_coordinator_that_holds_a_version_decides_on_it(manifest):
    for decide in (m.abort, lambda *args: m.commit(*args, "d")):
        with pytest.raises(m.Lost, match="taken over by one"):
            decide(manifest, "a", 1, "two")
    with pytest.raises(m.Lost, match="is being published by one"):
        m.take_over(manifest, "a", 1, "two", now=9.0, until=20.0)
    taken = m.take_over(manifest, "a", 1, "two", now=10.0, until=20.0)
    for decide in (m.abort, lambda *args: m.commit(*args, "d")):
        with pytest.raises(m.Lost, match="taken over by two"):
            decide(taken, "a", 1, "one")
    assert m.commit(taken, "a", 1, "two", "d").committed()["a"].digest == "d"


def test_a_decision_is_made_once(manifest):
    for decided in (m.abort(manifest, "a", 1, "one"), m.commit(manifest, "a", 1, "one", "d")):
        for decide in (m.abort, lambda *args: m.commit(*args, "e")):
            with pytest.raises(m.Lost, match="no longer prepared"):
                decide(decided, "a", 1, "one")


def test_members_live_as_long_as_their_lease(manifest):
    assert manifest.live(4.9) == ["x", "y"]
    renewed = m.renew(manifest, ["y", "z"], 9.0)
    assert renewed.live(5.0) == ["y", "z"]
    assert list(m.leave(renewed, "y").members) == ["x", "z"]
    with pytest.raises(m.Lost, match="y is no member"):
        m.leave(m.leave(renewed, "y"), "y")


def test_one_coordinator_at_a_time_repairs_members(manifest):
    kept = m.keep(manifest, "one", now=0.0, until=3.0)
    assert m.keep(kept, "one", now=2.0, until=5.0).keeper.until == 5.0
    with pytest.raises(m.Lost, match="one repairs the members"):
        m.keep(kept, "two", now=2.9, until=5.0)
    assert m.keep(kept, "two", now=3.0, until=6.0).keeper.coordinator == "two"


def test_its_text_reads_back_as_itself(manifest):
    done = m.commit(manifest, "a", 1, "one", "d")
    for each in (m.Manifest(), manifest, done, m.prepare(done, "a", prepared(2))):
        assert m.from_json(m.to_json(each)) == each


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1}', "nul"])
def test_another_text_is_refused(text):
    with pytest.raises(ValueError):
        m.from_json(text)


# --- The file -------------------------------------------------------------------------------------


def test_a_file_that_is_not_there_is_an_empty_manifest(tmp_path):
    assert asyncio.run(ManifestFile(tmp_path / "m").read()) == m.Manifest()


def test_of_two_changes_of_one_generation_one_is_made(tmp_path):
    async def main():
        file = ManifestFile(tmp_path / "m")
        one = m.renew(m.Manifest(), ["x"], 1.0)
        assert await file.compare_and_set(0, one)
        assert not await file.compare_and_set(0, m.renew(m.Manifest(), ["y"], 1.0))
        assert await file.read() == one

    asyncio.run(main())


def add_members(path, first, count):
    async def main():
        for number in range(first, first + count):
            await change(
                ManifestFile(path), functools.partial(m.renew, targets=[f"t{number}"], until=1.0)
            )

    asyncio.run(main())


def test_processes_lose_none_of_their_changes(tmp_path):
    context = multiprocessing.get_context("spawn")
    writers = [
        context.Process(target=add_members, args=(tmp_path / "m", 100 * n, 25)) for n in range(2)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
        assert writer.exitcode == 0
    manifest = asyncio.run(ManifestFile(tmp_path / "m").read())
    assert len(manifest.members) == 50
    assert manifest.generation == 50


CRASH = """
import asyncio, os, signal, sys
from dorad.fleet import manifest as m
from dorad.fleet.manifest_store import ManifestFile
real = getattr(os, sys.argv[2])
def die(*args):
    if sys.argv[3] == "after":
        real(*args)
    os.kill(os.getpid(), signal.SIGKILL)
file = ManifestFile(sys.argv[1])
before = asyncio.run(file.read())
setattr(os, sys.argv[2], die)
asyncio.run(file.compare_and_set(before.generation, m.renew(before, ["new"], 1.0)))
"""


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_crash_leaves_the_old_or_the_new_manifest(tmp_path, call, moment):
    path = tmp_path / "m"
    asyncio.run(ManifestFile(path).compare_and_set(0, m.renew(m.Manifest(), ["old"], 1.0)))
    line = [sys.executable, "-c", CRASH, str(path), call, moment]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run(line, env=env, timeout=120).returncode == -9
    left = asyncio.run(ManifestFile(path).read())
    renamed = (call, moment) == ("replace", "after")
    assert list(left.members) == (["old", "new"] if renamed else ["old"])
    # The lock went with the process.
    assert asyncio.run(ManifestFile(path).compare_and_set(left.generation, m.Manifest(9)))
