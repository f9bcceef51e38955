"""Which version a fleet's prompts are answered by, while its manifest changes."""

import asyncio

import dorad
import dorad.aio
import grpc
import numpy as np
import pytest
from dorad.fleet.manifest_store import ManifestFile
from fake_server import FakeServer, fail, unavailable

TENSORS = {"w": np.ones((2, 2), np.float32)}
PROMPTS = [[1], [2]]


def test_what_only_a_server_has_active_is_not_the_fleets(tmp_path):
    with FakeServer() as server, dorad.Fleet(tmp_path / "manifest", [server.target]) as fleet:
        with dorad.Client(server.target) as client:  # As before the commit of a first version.
            client.publish("a", tensors=TENSORS, config={}, activate=True)
        for policy in ("pin", "switch_keep_kv"):
            with pytest.raises(dorad.NotFound, match="the fleet has no 'a'"):
                fleet.generate_many(PROMPTS, adapter="a", in_flight_policy=policy, max_tokens=1)
        assert not server.generate_calls
        spans = fleet.generate_many(PROMPTS, adapter="a@1", max_tokens=1)[0][0].spans
        assert [span.label for span in spans] == ["a@1"]


class Reads(ManifestFile):
    """Holds back what one read has found."""

    def __init__(self, path):
        super().__init__(path)
        self.held = None

    async def read(self):
        manifest = await super().read()
        if self.held is not None:
            held, self.held = self.held, None
            await held.wait()
        return manifest


def test_a_read_of_the_manifest_that_ends_late_takes_nothing_back(tmp_path):
    async def main():
        store = Reads(tmp_path / "manifest")
        held = asyncio.Event()
        with FakeServer() as server:
            async with dorad.aio.Fleet(store, [server.target]) as fleet:
                await fleet.publish("a", tensors=TENSORS, config={})
                pool = fleet._pool
                pool._tending.cancel()
                store.held = held
                late = asyncio.ensure_future(pool._follow())
                await wait_for_held(store)
                second = await fleet.publish("a", tensors=TENSORS, config={})
                held.set()
                await late
                assert pool._manifest.pinned("a") == f"a@{second.version}:{second.digest}"

    asyncio.run(main())


async def wait_for_held(store):
    async with asyncio.timeout(60):
        while store.held is not None:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("ref", ["a@1", ""])
def test_a_fleet_retires_names_only(tmp_path, ref):
    with (
        FakeServer() as server,
        dorad.Fleet(tmp_path / "manifest", [server.target]) as fleet,
    ):
        fleet.publish("a", tensors=TENSORS, config={})
        with pytest.raises(ValueError, match=f"takes a name without a version, not '{ref}'"):
            fleet.retire(ref)
        fleet.retire("a")


def test_a_prompt_may_outlast_its_name(tmp_path):
    """The name is retired and published again between two attempts of a prompt."""
    manifest = tmp_path / "manifest"
    with FakeServer() as server, dorad.Fleet(manifest, [server.target]) as fleet:

        def publish():
            fleet.publish("a", tensors=TENSORS, config={})

        def refuse(context):
            fleet.retire("a")
            publish()
            unavailable(context)

        publish()
        server.refuse_generate.append(refuse)
        (samples,) = fleet.generate_many([[1]], adapter="a", max_tokens=1, retry_for=60)
        assert [span.label for span in samples[0].spans] == ["a@2"]
        assert not server.refuse_generate


def test_a_prompt_may_outlast_its_version(tmp_path):
    """Another process publishes while a member refuses the version that is gone there."""
    manifest = tmp_path / "manifest"
    with (
        FakeServer() as server,
        dorad.Fleet(manifest, [server.target]) as fleet,
        dorad.Fleet(manifest) as other,
    ):
        fleet.publish("a", tensors=TENSORS, config={})

        def refuse(context):
            other.publish("a", tensors=TENSORS, config={})
            code = grpc.StatusCode.FAILED_PRECONDITION
            fail(context, code, "ADAPTER_NOT_READY", "a@1 has been retired and is gone")

        server.refuse_generate.append(refuse)
        (samples,) = fleet.generate_many([[1]], adapter="a", max_tokens=1, retry_for=60)
        assert [span.label for span in samples[0].spans] == ["a@2"]
        with pytest.raises(dorad.NotFound):  # A version that the prompt names is gone for good.
            fleet.generate_many([[1]], adapter="a@3", max_tokens=1)


def test_a_prompt_that_may_switch_versions_waits_for_the_fleets(tmp_path):
    with FakeServer() as server, dorad.Fleet(tmp_path / "manifest", [server.target]) as fleet:
        for _ in range(2):
            fleet.publish("a", tensors=TENSORS, config={})
        with dorad.Client(server.target) as client:
            client.activate("a@1")  # As before the activation that follows a commit.
        options = dict(in_flight_policy="switch_keep_kv", max_tokens=1, retry_for=60)
        (samples,) = fleet.generate_many([[1]], adapter="a", **options)
        assert [span.label for span in samples[0].spans] == ["a@2"]


class Mute(FakeServer):
    """Tells nothing of single versions."""

    def Get(self, request, context):
        unavailable(context)


def test_a_publish_is_acknowledged_by_the_activation_itself(tmp_path):
    with Mute() as server, dorad.Fleet(tmp_path / "manifest", [server.target]) as fleet:
        version = fleet.publish("a", tensors=TENSORS, config={})
        assert (version.label, version.active) == ("a@1", True)
