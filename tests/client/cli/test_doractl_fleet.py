"""doractl fleet: what a manifest says, and what its members have."""

import asyncio
import json
import time

import pytest
from dorad.fleet import manifest as m
from dorad.fleet.manifest_store import ManifestFile
from lib.server import free_port


@pytest.fixture
def away():
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def path(doractl, server, folder, tmp_path, away):
    """A fleet with a server that has version 2 of two active, and one that is away."""
    doractl("adapters", "publish", "a", folder)
    doractl("adapters", "publish", "a", folder)
    digest = server.versions["a", 2].digest
    manifest = m.renew(m.Manifest(), [server.target], time.time() + 600)
    manifest = m.renew(manifest, [away], 0.0)
    release = m.Release(2, m.Files("c" * 64, "f" * 64, 7), "upload")
    manifest = m.prepare(manifest, "a", m.Prepared(release, "one", 0.0))
    manifest = m.commit(manifest, "a", 2, "one", digest)
    path = tmp_path / "manifest"
    write(path, manifest)
    return path


def write(path, manifest):
    store = ManifestFile(path)
    before = asyncio.run(store.read()).generation
    assert asyncio.run(store.compare_and_set(before, manifest))


def read(path):
    return asyncio.run(ManifestFile(path).read())


def test_shows_members_and_versions(doractl, server, path, away):
    report = json.loads(doractl("fleet", "show", path, "-o", "json"))
    assert report["members"] == [
        {
            "target": server.target,
            "live": True,
            "state": "ready",
            "versions": {"a": 2},
            "behind": [],
            "lag": 0,
            "sent": 3 << 20,
            "received": 1 << 20,
        },
        {
            "target": away,
            "live": False,
            "state": "away",
            "versions": {},
            "behind": ["a@2"],
            "lag": None,
            "sent": None,
            "received": None,
        },
    ]
    (adapter,) = report["adapters"]
    assert adapter["committed"] == 2 and adapter["prepared"] == 0 and not adapter["left"]
    text = doractl("fleet", "show", path)
    assert server.target in text and "a@2" in text
    assert " 3.1 MB " in text and " 1.0 MB " in text
    assert adapter["bytes"] == 7 and " 7 B " in text


def test_shows_a_member_that_is_behind_and_a_version_on_its_way(doractl, server, path):
    doractl("adapters", "activate", "a@1")
    release = m.Release(3, m.Files("c" * 64, "f" * 64, 7), "upload-3")
    write(path, m.prepare(read(path), "a", m.Prepared(release, "two", 0.0)))
    report = json.loads(doractl("fleet", "show", path, "-o", "json"))
    assert report["members"][0]["state"] == "behind"
    assert report["members"][0]["behind"] == ["a@2"]
    assert report["members"][0]["lag"] == 1
    assert report["adapters"][0]["prepared"] == 3
    assert report["adapters"][0]["coordinator"] == "two"
    assert report["adapters"][0]["left"], "its lease has ended"


def test_adds_and_removes_members(doractl, path, away):
    assert doractl("fleet", "join", path, "10.0.0.9:1") == "10.0.0.9:1 is a member\n"
    assert "10.0.0.9:1" in read(path).live(time.time())
    assert doractl("fleet", "leave", path, away) == f"{away} is no member\n"
    assert away not in read(path).members
    assert "no member" in doractl("fleet", "leave", path, away, code=1)


def test_the_only_holder_of_a_version_leaves_by_force_only(doractl, server, path):
    refused = doractl("fleet", "leave", path, server.target, code=1)
    assert "a@2: FAILED_PRECONDITION: no member has kept its files" in refused
    assert server.target in read(path).members
    doractl("fleet", "leave", path, server.target, "--force")
    assert server.target not in read(path).members


def test_a_manifest_must_be_there(doractl, tmp_path):
    assert "No such file" in doractl("fleet", "show", tmp_path / "none", code=64)
