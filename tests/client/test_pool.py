"""The pool against fake servers that fail, hang or lose a version; and its end."""

import asyncio
import contextlib
import threading
import time

import dorad
import dorad.aio
import grpc
import numpy as np
import pytest
from dorad.v1 import types_pb2
from fake_server import FakeServer, fail
from grpc_health.v1 import health_pb2
from lib.server import wait_until

TENSORS = {"w": np.ones((2, 2), np.float32)}
PROMPTS = [[i + 1] for i in range(8)]


@pytest.fixture
def pair():
    with FakeServer() as first, FakeServer() as second:
        yield first, second


@contextlib.contextmanager
def pool_of(*servers, **arguments):
    with dorad.RolloutPool([server.target for server in servers], **arguments) as pool:
        yield pool


def publish(pool, name="a", **options):
    return pool.publish(name, tensors=TENSORS, config={}, **options)


def forget(server):
    """What a restart does to versions that are not durable."""
    server.versions.clear()
    server.active.clear()


def states(pool):
    return [report.state for report in pool.report()]


def no_active_version(context):
    fail(context, grpc.StatusCode.NOT_FOUND, "ADAPTER_NO_ACTIVE_VERSION", "none is active")


def test_a_server_that_has_lost_its_adapter_is_stale_and_its_prompts_go_elsewhere(pair):
    _, second = pair
    with pool_of(*pair) as pool:
        publish(pool)
        pool.generate_many(PROMPTS, adapter="a", max_tokens=1)
        forget(second)
        for _ in range(2):
            results = pool.generate_many(PROMPTS, adapter="a", max_tokens=1)
            assert [len(samples) for samples in results] == [1] * len(PROMPTS)
        assert states(pool) == ["ready", "stale"]
        assert 1 <= pool.report()[1].lost <= len(PROMPTS)
        assert publish(pool).version == 2
        assert states(pool) == ["ready", "ready"]


def test_a_server_without_an_active_version_is_stale(pair):
    _, second = pair
    with pool_of(*pair) as pool:
        publish(pool)
        pool.generate_many(PROMPTS, adapter="a", max_tokens=1)
        second.refuse_generate = [no_active_version] * len(PROMPTS)
        second.active.clear()
        assert len(pool.generate_many(PROMPTS, adapter="a", max_tokens=1)) == len(PROMPTS)
        assert states(pool) == ["ready", "stale"]


def test_what_no_server_has_any_more_is_not_found(pair):
    with pool_of(*pair) as pool:
        publish(pool)
        pool.generate_many(PROMPTS, adapter="a", max_tokens=1)
        for server in pair:
            forget(server)
        for _ in range(2):
            errors = pool.generate_many(PROMPTS, adapter="a", return_errors=True)
            assert {type(error) for error in errors} == {dorad.NotFound}
        # Their base model is not concerned.
        assert len(pool.generate_many(PROMPTS, max_tokens=1)) == len(PROMPTS)


def test_a_pinned_version_that_some_servers_lack_is_asked_of_the_others(pair):
    _, second = pair
    with pool_of(*pair) as pool:
        publish(pool)
        with dorad.Client(second.target) as alone:
            alone.publish("a", tensors=TENSORS, config={}, version=7, activate=False)
        assert len(pool.generate_many(PROMPTS, adapter="a@7", max_tokens=1)) == len(PROMPTS)
        with pytest.raises(dorad.NotFound):
            pool.generate_many(PROMPTS, adapter="a@8", max_tokens=1)
        assert states(pool) == ["ready", "ready"], "they have what is to be active"


def test_a_retired_version_is_forgotten(pair):
    with pool_of(*pair) as pool:
        pool.retire(publish(pool))
        with pytest.raises(dorad.NotFound):
            pool.generate_many(PROMPTS, adapter="a", max_tokens=1)
        assert states(pool) == ["ready", "ready"]


class Calls:
    """Calls in threads of their own, and the result of each."""

    def __init__(self, *calls):
        self.results = [None] * len(calls)
        self._threads = [
            threading.Thread(target=self._run, args=(index, call), daemon=True)
            for index, call in enumerate(calls)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, index, call):
        try:
            self.results[index] = call()
        except Exception as error:
            self.results[index] = error

    def join(self):
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a call hangs"
        return self.results


def test_closing_the_pool_ends_the_calls_of_other_threads(server):
    server.endless = True
    big = {f"t{i}": np.zeros(1 << 18, np.float32) for i in range(40)}
    begun = threading.Event()

    def slow(sent, total):
        begun.set()
        time.sleep(0.1)

    pool = dorad.RolloutPool([server.target])
    calls = Calls(
        lambda: pool.generate_many(PROMPTS),
        lambda: pool.publish("a", tensors=big, config={}, progress=slow),
        lambda: begun.wait(20) and publish(pool, "b"),  # waits for the other publish
    )
    wait_until(lambda: begun.is_set() and server.running == len(PROMPTS))
    time.sleep(0.2)
    pool.close()
    pool.close()
    assert [type(result) for result in calls.join()] == [dorad.Cancelled] * 3
    wait_until(lambda: server.running == 0)
    assert server.versions == {}
    with pytest.raises(dorad.Cancelled, match="closed"):
        pool.report()


@pytest.mark.parametrize("call", ["report", "close"])
def test_the_pools_own_thread_cannot_wait_for_the_pool(server, call):
    with pool_of(server) as pool:
        many = Calls(
            lambda: pool.generate_many([[1]], progress=lambda done, total: getattr(pool, call)())
        )
        (error,) = many.join()
        assert isinstance(error, RuntimeError) and "another thread" in str(error)
        assert pool.generate_many([[1]], max_tokens=1)


class Hanging(FakeServer):
    """Answers no question about adapters while `hang` is set."""

    hang = False
    asked = 0  # while it hung

    def _wait(self, context):
        self.asked += self.hang
        while self.hang and context.is_active():
            time.sleep(0.01)

    def List(self, request, context):
        self._wait(context)
        return super().List(request, context)

    def Get(self, request, context):
        self._wait(context)
        return super().Get(request, context)

    def Retire(self, request, context):
        self._wait(context)
        return super().Retire(request, context)


@pytest.mark.parametrize(
    "call",
    [
        lambda pool: publish(pool, timeout=4.0),
        lambda pool: pool.activate("a@1", timeout=4.0),
        lambda pool: pool.retire("a@1", timeout=4.0),
    ],
    ids=["publish", "activate", "retire"],
)
def test_the_timeout_of_a_change_spans_all_that_it_asks(server, call):
    with Hanging() as hanging, pool_of(server, hanging) as pool:
        publish(pool)
        hanging.hang = True
        (error,) = Calls(lambda: call(pool)).join()
        assert isinstance(error, dorad.PoolError) and error.failures.keys() == {hanging.target}


def test_the_timeout_of_a_change_spans_its_wait_for_the_one_before(server):
    with Hanging() as hanging, pool_of(server, hanging) as pool:
        hanging.hang = True
        first = Calls(lambda: publish(pool))
        wait_until(lambda: hanging.asked)
        (error,) = Calls(lambda: publish(pool, timeout=1.0)).join()
        assert isinstance(error, dorad.DeadlineExceeded)
        hanging.hang = False
        assert first.join()[0].version == 1


def test_prompts_do_not_wait_for_a_server_that_does_not_tell_its_version(server):
    with Hanging() as hanging:
        with pool_of(server, hanging) as pool:
            publish(pool)
        with pool_of(server, hanging) as pool:
            pool.generate_many(PROMPTS, max_tokens=1)
            hanging.hang = True
            begin = len(hanging.generate_calls)
            (results,) = Calls(
                lambda: pool.generate_many(PROMPTS, adapter="a", timeout=50.0, max_tokens=1)
            ).join()
            assert [samples[0].spans[0].label for samples in results] == ["a@1"] * len(PROMPTS)
            assert len(hanging.generate_calls) == begin
            with pool_of(hanging) as alone:
                call = Calls(lambda: alone.generate_many([[1]], adapter="a", timeout=1.0))
                assert isinstance(call.join()[0], dorad.DeadlineExceeded)


def test_a_server_that_begins_to_serve_after_it_was_asked_is_held_to_its_active_version(server):
    with pool_of(server) as pool:
        publish(pool)
    server.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    with pool_of(server) as pool:
        (sample,) = pool.generate_many([[1]], adapter="a", max_tokens=1)[0]
        assert sample.spans[0].label == "a@1"
        with dorad.Client(server.target) as stranger:
            stranger.publish("a", tensors={"w": np.zeros(3, np.float32)}, config={})
        with pytest.raises(dorad.UnexpectedVersion, match="a@2"):
            pool.generate_many([[1]], adapter="a", max_tokens=1)
    with pool_of(server) as pool, pytest.raises(dorad.NotFound):
        pool.generate_many([[1]], adapter="b")


def test_a_version_of_the_right_number_with_other_weights_is_unexpected(server):
    with pool_of(server) as pool:
        publish(pool)
        pool.generate_many([[1]], adapter="a", max_tokens=1)
        server.versions["a", 1].digest = "f" * 64
        with pytest.raises(dorad.UnexpectedVersion, match="a@1"):
            pool.generate_many([[1]], adapter="a", max_tokens=1)


def test_an_earlier_version_is_unexpected_though_it_was_active_once(server):
    with pool_of(server) as pool:
        publish(pool)
        publish(pool)
        pool.generate_many([[1]], adapter="a", max_tokens=1)
        with dorad.Client(server.target) as stranger:
            stranger.activate("a@1")
        with pytest.raises(dorad.UnexpectedVersion, match="a@1"):
            pool.generate_many([[1]], adapter="a", max_tokens=1)


def test_removing_a_server_that_a_change_waits_for_is_that_servers_failure(server):
    with Hanging() as hanging, pool_of(server, hanging) as pool:
        hanging.hang = True
        call = Calls(lambda: publish(pool))
        wait_until(lambda: ("List", "a") in hanging.routing.seen)
        pool.remove(hanging.target)
        (error,) = call.join()
        assert isinstance(error, dorad.PoolError) and error.failures.keys() == {hanging.target}
        assert isinstance(error.failures[hanging.target], dorad.Cancelled)
        assert publish(pool).active


def test_a_server_that_was_removed_after_its_upload_does_not_hide_who_failed(pair):
    first, second = pair
    uploading = threading.Event()

    class Removing(dorad.aio.Client):
        """The second server's upload fails when the first one's is done and it is removed."""

        async def publish(self, *arguments, **options):
            if self.target == first.target:
                version = await super().publish(*arguments, **options)
                uploading.set()
                return version
            await asyncio.to_thread(removed.wait, 20)
            raise dorad.Internal("broken", code="INTERNAL")

    removed = threading.Event()
    with pool_of(*pair, connect=Removing) as pool:
        call = Calls(lambda: publish(pool))
        assert uploading.wait(20)
        pool.remove(first.target)
        removed.set()
        (error,) = call.join()
        assert isinstance(error, dorad.PoolError) and error.failures.keys() == {second.target}


def test_closing_an_asyncio_pool_cancels_its_calls(server):
    server.endless = True

    async def body():
        pool = dorad.aio.RolloutPool([server.target])
        call = asyncio.create_task(pool.generate_many(PROMPTS))
        await asyncio.to_thread(wait_until, lambda: server.running == len(PROMPTS))
        await pool.close()
        with pytest.raises(dorad.Cancelled):
            await asyncio.wait_for(call, 20)

    asyncio.run(body())


def test_prompts_that_a_server_aborts_as_it_ends_go_to_another_one(pair):
    first, second = pair
    with pool_of(*pair) as pool:
        pool.generate_many(PROMPTS, max_tokens=1)
        first.finish_reason = types_pb2.FINISH_REASON_ABORTED
        aborted = pool.generate_many(PROMPTS, max_tokens=1)  # as somebody asked for
        assert any(s.finish_reason is dorad.FinishReason.ABORTED for (s,) in aborted)
        first.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        results = pool.generate_many(PROMPTS, max_tokens=1)
        assert not any(s.finish_reason is dorad.FinishReason.ABORTED for (s,) in results)
        assert states(pool) == ["unavailable", "ready"]
        second.finish_reason = types_pb2.FINISH_REASON_ABORTED
        second.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        with pytest.raises(dorad.Unavailable, match="ends"):
            pool.generate_many(PROMPTS, max_tokens=1, retry_for=0)
