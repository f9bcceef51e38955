"""Several real servers as one: a version is active on all or on none, prompts survive a server."""

import asyncio
import contextlib
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dorad
import dorad.aio
import pytest
from lib.server import serve, wait_until

PROMPTS = [[11, 12, 13 + i] for i in range(24)]


@contextlib.contextmanager
def servers(model, count, **settings):
    with contextlib.ExitStack() as stack:
        values = {"engine.threads": 1, "engine.kv_bytes": 64 << 20} | settings
        yield [stack.enter_context(serve(model, settings=values)) for _ in range(count)]


@pytest.fixture(scope="module")
def pair(zoo):
    """Two servers that the tests leave running; each test uses a name of its own."""
    with servers(zoo.model("llama2"), 2) as both:
        yield [server.grpc for server in both]


@pytest.fixture
def folder(zoo):
    return zoo.adapter("llama2", "dora")


@pytest.fixture
def other(zoo):
    return zoo.adapter("llama2", "dora", 1)


def active(target, name):
    """The version that a server has active, or None."""
    with dorad.Client(target) as client:
        return next((v.version for v in client.adapters(name) if v.active), None)


def states(target, name):
    with dorad.Client(target) as client:
        return {v.version: v.state for v in client.adapters(name)}


def test_publishes_everywhere_under_one_number_above_all_that_exist(pair, folder, other):
    with dorad.Client(pair[1]) as alone:
        alone.publish("common", path=other, version=6)
    with dorad.RolloutPool(pair) as pool:
        version = pool.publish("common", path=folder, activate=False, tags={"step": "1"})
        assert version.label == "common@7" and version.state == "ready"
        assert version.tags == {"step": "1"} and not version.active
        assert active(pair[0], "common") is None and active(pair[1], "common") == 6
        assert pool.activate(version).active
        assert [active(target, "common") for target in pair] == [7, 7]
        assert pool.publish("common", path=other).label == "common@8"
        assert [active(target, "common") for target in pair] == [8, 8]
        pool.retire("common@7")
        assert states(pair[0], "common") == {7: "gone", 8: "ready"}


def test_spreads_prompts_and_gives_what_one_server_gives(pair, folder):
    with dorad.RolloutPool(pair) as pool, dorad.Client(pair[0]) as alone:
        pool.publish("spread", path=folder)
        options = dict(adapter="spread", n=2, max_tokens=8, seed=5, logprobs="raw")
        done = []
        results = pool.generate_many(PROMPTS, progress=lambda *at: done.append(at), **options)
        expected = alone.generate_many(PROMPTS, **options)
        tokens = [[s.token_ids.tolist() for s in samples] for samples in results]
        assert tokens == [[s.token_ids.tolist() for s in samples] for samples in expected]
        assert done[-1] == (24, 24)
        reports = pool.report()
        assert [r.target for r in reports] == pair and sum(r.completed for r in reports) == 24
        for report in reports:
            assert report.state == "ready" and report.versions["spread"] == 1
            assert report.completed > 4 and report.latency > 0
            assert (report.outstanding, report.lost, report.unexpected_version) == (0, 0, 0)
        base = pool.generate_many(PROMPTS[:2], max_tokens=2)
        assert [s.spans[0].label for (s,) in base] == [None, None]
        (pinned,) = pool.generate_many([[5, 6]], adapter="spread@1", max_tokens=2)[0]
        assert pinned.spans[0].version == 1


def test_a_refused_publish_leaves_nothing_active_and_names_who_refused(zoo, folder):
    with contextlib.ExitStack() as stack:
        model = zoo.model("llama2")
        good = stack.enter_context(serve(model))
        picky = stack.enter_context(serve(model, settings={"adapters.max_rank": 4}))
        pool = stack.enter_context(dorad.RolloutPool([good.grpc, picky.grpc]))
        with pytest.raises(dorad.PoolError, match="a@1 was not published everywhere") as caught:
            pool.publish("a", path=folder)
        assert caught.value.failures.keys() == {picky.grpc}
        assert caught.value.failures[picky.grpc].violations[0].reason == "ADAPTER_RANK_TOO_LARGE"
        assert picky.grpc in str(caught.value)
        assert states(good.grpc, "a") == {1: "gone"} and active(good.grpc, "a") is None
        pool.remove(picky.grpc)
        assert pool.publish("a", path=folder).label == "a@2"
        assert pool.targets == [good.grpc]
        with pytest.raises(ValueError, match="only server"):
            pool.remove(good.grpc)


def test_a_server_that_hangs_is_named_and_nothing_is_activated(zoo, folder, other):
    class Halting(dorad.aio.Client):
        """Stops the second server when it is to get the second version."""

        async def publish(self, *arguments, **options):
            if self.target == second.grpc and options["version"] == 2:
                os.kill(second.pid, signal.SIGSTOP)
            return await super().publish(*arguments, **options)

    with (
        servers(zoo.model("llama2"), 2) as (first, second),
        dorad.RolloutPool([first.grpc, second.grpc], connect=Halting) as pool,
    ):
        pool.publish("a", path=folder)
        try:
            with pytest.raises(dorad.PoolError) as caught:
                pool.publish("a", path=other, timeout=8.0)  # Ample for the first.
        finally:
            os.kill(second.pid, signal.SIGCONT)
        assert caught.value.failures.keys() == {second.grpc}
        # The upload has a connection of its own, and may end before that is there.
        error = caught.value.failures[second.grpc]
        assert isinstance(error, (dorad.DeadlineExceeded, dorad.Unavailable))
        assert [active(s.grpc, "a") for s in (first, second)] == [1, 1]
        assert states(first.grpc, "a")[2] == "gone"


def test_activates_nowhere_what_is_not_ready_everywhere(pair, folder, other):
    with dorad.RolloutPool(pair) as pool:
        pool.publish("absent", path=folder)
        with dorad.Client(pair[0]) as alone:
            alone.publish("absent", path=other, activate=False)
        with pytest.raises(dorad.PoolError, match="nothing was activated") as caught:
            pool.activate("absent@2")
        assert isinstance(caught.value.failures[pair[1]], dorad.NotFound)
        assert len(caught.value.failures) == 1
        # The same number with another content is not the same version.
        with dorad.Client(pair[1]) as alone:
            alone.publish("absent", path=folder, activate=False)
        with pytest.raises(dorad.PoolError, match="not the same") as caught:
            pool.activate("absent@2")
        assert caught.value.failures.keys() == set(pair)
        assert [active(target, "absent") for target in pair] == [1, 1]


@pytest.mark.parametrize("done_all_the_same", [False, True])
def test_a_failed_activation_is_rolled_back(pair, folder, other, done_all_the_same):
    """The second server's answer gets lost, before or after it has activated the version."""

    class Failing(dorad.aio.Client):
        failures_left = 0

        async def activate(self, *arguments, **options):
            if self.target != pair[1] or not Failing.failures_left:
                return await super().activate(*arguments, **options)
            Failing.failures_left -= 1
            if done_all_the_same:
                await super().activate(*arguments, **options)
            raise dorad.Unavailable("connection lost", code="UNAVAILABLE")

    name = f"rolled{int(done_all_the_same)}"
    with dorad.RolloutPool(pair, connect=Failing) as pool:
        pool.publish(name, path=folder)
        Failing.failures_left = 1
        with pytest.raises(dorad.PoolError, match=f"{name}@2 was not activated") as caught:
            pool.publish(name, path=other)
        assert caught.value.failures.keys() == {pair[1]}
        assert caught.value.not_rolled_back == {}
        assert [active(target, name) for target in pair] == [1, 1]
        (sample,) = pool.generate_many([[5, 6]], adapter=name, max_tokens=2)[0]
        assert sample.spans[0].version == 1
        # There is no version to go back to: that is said.
        Failing.failures_left = 1
        with pytest.raises(dorad.PoolError, match="is not rolled back") as caught:
            pool.publish(f"{name}-new", path=folder)
        assert caught.value.not_rolled_back.keys() == {pair[0]}


def test_an_unexpected_version_is_an_error_and_takes_the_server_out(pair, folder, other):
    with dorad.RolloutPool(pair) as pool:
        pool.publish("meddled", path=folder)
        pool.generate_many(PROMPTS, adapter="meddled", max_tokens=2)
        with dorad.Client(pair[1]) as stranger:
            stranger.publish("meddled", path=other)
        results = pool.generate_many(
            PROMPTS, adapter="meddled", max_tokens=2, concurrency=2, return_errors=True
        )
        errors = [r for r in results if isinstance(r, dorad.DoradError)]
        assert 1 <= len(errors) <= 2, "the server was asked again"
        assert isinstance(errors[0], dorad.UnexpectedVersion)
        assert "meddled@2" in str(errors[0]) and pair[1] in str(errors[0])
        report = pool.report()[1]
        assert report.state == "stale" and report.unexpected_version == len(errors)
        assert report.versions["meddled"] == 2
        with dorad.Client(pair[1]) as stranger:
            stranger.activate("meddled@1")
        assert pool.report()[1].state == "ready"
        pool.generate_many(PROMPTS, adapter="meddled", max_tokens=2)


def test_a_pool_that_has_activated_nothing_wants_the_servers_to_agree(pair, folder, other):
    with dorad.RolloutPool(pair) as first:
        first.publish("shared", path=folder)
    with dorad.RolloutPool(pair) as pool:
        (sample,) = pool.generate_many([[5]], adapter="shared", max_tokens=1)[0]
        assert sample.spans[0].version == 1
    with dorad.Client(pair[0]) as stranger:
        stranger.publish("shared", path=other)
    with dorad.RolloutPool(pair) as pool:
        with pytest.raises(dorad.PoolError, match="do not agree") as caught:
            pool.generate_many([[5]], adapter="shared", max_tokens=1)
        assert "shared@2 is active" in str(caught.value)


def test_versions_change_while_prompts_run(pair, folder, other):
    async def main():
        begun, changed = asyncio.Event(), asyncio.Event()

        async def rollouts(pool):
            spans, last = [], False
            while not last:  # one more after the last change
                last = changed.is_set()
                samples = await pool.generate_many(
                    [[7, 8, i + 6] for i in range(50)],
                    adapter="moving", max_tokens=16, ignore_eos=True, concurrency=16,
                )  # fmt: skip
                spans += [sample[0].spans for sample in samples]
                begun.set()
            return spans

        async with dorad.aio.RolloutPool(pair) as pool:
            first = await pool.publish("moving", path=folder)
            running = asyncio.create_task(rollouts(pool))
            await begun.wait()
            for path in (other, folder, other):
                version = await pool.publish("moving", path=path)
                await pool.retire(f"moving@{version.version - 1}")
            changed.set()
            return await running, {first.version, version.version}

    spans, first_and_last = asyncio.run(main())
    assert all(len(sample) == 1 for sample in spans)
    assert first_and_last <= {sample[0].version for sample in spans}


def test_prompts_survive_a_server_that_is_killed(zoo):
    with contextlib.ExitStack() as stack:
        values = {"engine.threads": 1, "engine.kv_bytes": 64 << 20}
        exits = [None, 0]  # The first one is killed.
        both = [
            stack.enter_context(serve(zoo.model("slow"), settings=values, expect_exit=code))
            for code in exits
        ]
        pool = stack.enter_context(dorad.RolloutPool([server.grpc for server in both]))
        pool.publish("a", path=zoo.adapter("slow", "dora"))
        options = dict(adapter="a", max_tokens=48, ignore_eos=True, seed=3, concurrency=8)
        with ThreadPoolExecutor(1) as background:
            answers = background.submit(pool.generate_many, PROMPTS, timeout=120, **options)
            wait_until(lambda: both[0].wire.info().engine.running_sequences, what="prompts there")
            os.kill(both[0].pid, signal.SIGKILL)
        results = answers.result()
        assert len(results) == len(PROMPTS), "generate_many did not return a result for each prompt"
        with dorad.Client(both[1].grpc) as alone:
            expected = alone.generate_many(PROMPTS, **options)
        for (ours,), (theirs,) in zip(results, expected, strict=True):
            assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        dead, alive = pool.report()
        assert dead.state == "unavailable" and dead.lost >= 1
        assert alive.state == "ready" and alive.completed + dead.completed == len(PROMPTS)
        with pytest.raises(dorad.PoolError) as caught:
            pool.publish("a", path=zoo.adapter("slow", "dora"))
        assert caught.value.failures.keys() == {both[0].grpc}


def test_frozen_prompts_of_a_server_that_ends_go_to_another_one(zoo):
    with (
        servers(zoo.model("llama2"), 2) as both,
        dorad.RolloutPool([server.grpc for server in both]) as pool,
    ):
        options = dict(max_tokens=24, ignore_eos=True, seed=3)
        expected = pool.generate_many(PROMPTS, **options)
        with dorad.Client(both[0].grpc) as client:
            client.pause("keep")
        before = pool.report()[1].completed
        with ThreadPoolExecutor(1) as background:
            results = background.submit(pool.generate_many, PROMPTS, timeout=60, **options)
            wait_until(lambda: pool.report()[1].completed > before, what="a prompt of the other")
            wait_until(lambda: pool.report()[0].outstanding, what="frozen prompts")
            os.kill(both[0].pid, signal.SIGTERM)
        assert both[0].process.wait(60) == 0
        tokens = [[s.token_ids.tolist() for s in samples] for samples in results.result()]
        assert tokens == [[s.token_ids.tolist() for s in samples] for samples in expected]
        assert pool.report()[0].lost >= 1


def test_a_removed_servers_prompts_go_to_another_one(zoo):
    with (
        servers(zoo.model("slow"), 2) as both,
        dorad.RolloutPool([server.grpc for server in both]) as pool,
    ):
        options = dict(max_tokens=48, ignore_eos=True, concurrency=8)
        with ThreadPoolExecutor(1) as background:
            results = background.submit(pool.generate_many, PROMPTS, timeout=120, **options)
            wait_until(lambda: both[0].wire.info().engine.running_sequences, what="prompts there")
            pool.remove(both[0].grpc)
        assert len(results.result()) == len(PROMPTS)
        (report,) = pool.report()
        assert report.target == both[1].grpc and report.completed > 12
        pool.add(both[0].grpc)
        pool.generate_many(PROMPTS, max_tokens=2)
        assert all(report.state == "ready" for report in pool.report())


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP has reached every thread: until then one may still answer."""
    stats = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(text.rpartition(")")[2].split()[0] == "T" for text in stats)


def test_a_server_that_lags_behind_is_reported_as_a_straggler(zoo):
    with (
        servers(zoo.model("llama2"), 2) as both,
        dorad.RolloutPool([server.grpc for server in both]) as pool,
    ):
        pool.generate_many(PROMPTS, max_tokens=4)
        assert not any(report.outstanding for report in pool.report())
        os.kill(both[0].pid, signal.SIGSTOP)
        try:
            wait_until(lambda: is_stopped(both[0].pid), what="all threads to stop")
            worker = threading.Thread(
                target=lambda: pool.generate_many(PROMPTS, max_tokens=4, concurrency=4)
            )
            worker.start()
            first, second = pool.report()  # It waits for the server as long as for any probe.
            assert first.straggler and 1 <= first.outstanding <= 3 and first.oldest > 1
            assert first.state == "unavailable" and first.versions == {}
            assert not second.straggler and second.state == "ready" and second.outstanding == 0
        finally:
            os.kill(both[0].pid, signal.SIGCONT)
        worker.join(60)
        assert not worker.is_alive()
        first, second = pool.report()
        assert first.completed + second.completed == 2 * len(PROMPTS)
        assert first.state == "ready" and second.completed > first.completed
