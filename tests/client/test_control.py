"""Calls that control a server: abort, sleep, limits, pauses and health."""

import json

import dorad
import pytest
from dorad._jsonable import to_jsonable
from dorad.v1 import control_pb2
from lib.server import wait_until


def test_aborts_by_id_adapter_or_all(client, server):
    assert client.abort("r1") == 3
    client.abort(["r1", "r2"])
    client.abort(adapter="a@1")
    client.abort(all=True)
    assert [a.WhichOneof("target") for a in server.aborts] == [
        "requests",
        "requests",
        "adapter",
        "all",
    ]
    assert list(server.aborts[1].requests.request_ids) == ["r1", "r2"]
    with pytest.raises(ValueError, match="exactly one"):
        client.abort()
    with pytest.raises(ValueError, match="exactly one"):
        client.abort("r", all=True)


def test_sleeps_and_wakes(client, server):
    assert client.sleep("kv", keep_kv=True, refuse_requests=True) == {"kv": 1 << 20}
    (request,) = server.sleep_requests
    assert request.keep_kv and request.refuse_requests
    assert client.sleep() == {"weights": 1 << 20, "adapters": 1 << 20}
    assert not server.sleep_requests[1].keep_kv
    assert client.info().engine.sleeping == ["adapters", "kv", "weights"]
    client.wake("weights", "adapters")
    assert client.info().engine.sleeping == ["kv"]
    client.wake()
    assert client.info().engine.sleeping == []


def test_yields_and_ends_the_yield(client, server):
    assert client.limit_gpu_share(0.5, time_to_live=2.5, limit_id="a") == 0.5
    assert client.limit_gpu_share(0.75, time_to_live=60, limit_id="b") == 0.5
    assert server.gpu_share_requests[0].time_to_live.ToMilliseconds() == 2500
    assert client.info().engine.gpu_share == 0.5
    assert client.end_gpu_share_limit("a") and not client.end_gpu_share_limit("a")
    assert client.info().engine.gpu_share == 0.75


def test_a_block_renews_its_yield_and_ends_it(client, server):
    with client.limited_gpu_share(0.25, time_to_live=0.15) as share:
        assert share == 0.25 and list(server.gpu_share_limits.values()) == [0.25]
        with client.limited_gpu_share(0.5) as both:
            assert both == 0.25 and len(server.gpu_share_limits) == 2
        wait_until(lambda: len(server.gpu_share_requests) >= 5)
        assert len(server.gpu_share_limits) == 1
    assert server.gpu_share_limits == {}
    assert {request.time_to_live.ToMilliseconds() for request in server.gpu_share_requests} == {
        150,
        30_000,
    }


def test_only_the_first_call_of_a_yield_can_fail_the_block(client, server, caplog):
    server.failing_limits = {1}
    with pytest.raises(dorad.DoradError), client.limited_gpu_share(0.25):
        raise AssertionError("must not run")
    server.failing_limits = {3}
    with client.limited_gpu_share(0.25, time_to_live=0.15):
        wait_until(lambda: len(server.gpu_share_requests) >= 4)
    assert "could not be renewed" in caplog.text and server.gpu_share_limits == {}
    with pytest.raises(ZeroDivisionError), client.limited_gpu_share(0.25):
        raise ZeroDivisionError
    assert server.gpu_share_limits == {}
    with pytest.raises(ValueError, match="time_to_live"):
        client.limited_gpu_share(0.25, time_to_live=0)


def test_pauses_and_resumes(client, server):
    assert client.pause() == 2 and client.info().engine.paused
    client.pause("wait")
    client.resume()
    assert server.pause_modes == [control_pb2.PAUSE_MODE_KEEP, control_pb2.PAUSE_MODE_WAIT]
    assert not client.info().engine.paused
    client.pause(adapter="a@2")
    assert client.info().engine.paused_adapters == ["a@2"] and not client.info().engine.paused
    client.resume("a@2")
    assert client.info().engine.paused_adapters == []
    with pytest.raises(ValueError, match="abort, wait, keep"):
        client.pause("sleep")


def test_info(client):
    info = client.info()
    assert info.model.vocab_size == 1000 and info.model.eos_token_ids == [2]
    assert info.uptime == 90.0 and info.memory_bytes == {"weights": 1 << 20}
    json.dumps(to_jsonable(info))


def test_health(client, server):
    assert client.health() == "serving"
    client.wait_ready(5)
    server.health.set("", 2)
    assert client.health() == "not_serving"
    with pytest.raises(dorad.Unavailable, match="not_serving"):
        client.wait_ready(0.2)
    with pytest.raises(dorad.NotFound):
        client.health("no.such.Service")
