"""deploy/nginx with the real nginx before real servers: what must pass does, the rest does not."""

import json
import signal
import subprocess
import sys
from collections import defaultdict
from contextlib import contextmanager

import dorad
import grpc
import httpx
import pytest
from lib import zygote
from lib.gateway import command as gateway_command
from lib.gateway import running_gateway
from lib.nginx import nginx
from lib.server import command, environment, serve, start, wait_until

PROMPT = [11, 12, 13, 14, 15]
NAMES = [f"adapter-{i}" for i in range(20)]


@contextmanager
def client_of(proxy, admin: bool = False, certified: bool = False, **options):
    port = proxy.admin if admin else proxy.public
    credentials = proxy.credentials(certified)
    with dorad.Client(f"127.0.0.1:{port}", credentials=credentials, timeout=60, **options) as it:
        yield it


@pytest.fixture(scope="module")
def server(zoo):
    with serve(zoo.model("slow"), {"a": zoo.adapter("slow", "dora")}) as running:
        yield running


@pytest.fixture(scope="module")
def proxy(server):
    with nginx([server.grpc]) as running:
        yield running


@pytest.fixture
def client(proxy):
    with client_of(proxy) as it:
        yield it


@pytest.fixture
def direct(server):
    with dorad.Client(server.grpc, timeout=60) as it:
        yield it


def test_nginx_accepts_the_configuration(proxy) -> None:
    proxy.check()


def test_streams_pass_token_by_token(client, direct) -> None:
    options = dict(adapter="a", max_tokens=30, seed=5, logprobs="raw", ignore_eos=True)
    deltas = list(client.stream(PROMPT, **options))
    assert len(deltas) > 5, "the proxy collects what it should pass on"
    (expected,) = direct.generate(PROMPT, **options)
    tokens = [token for delta in deltas for token in delta.token_ids]
    assert tokens == expected.token_ids.tolist()
    (final,) = client.generate(PROMPT, **options)
    assert final.logprobs.tolist() == expected.logprobs.tolist()


def test_error_details_pass(client, direct) -> None:
    bad = dict(adapter="a", n=10**6, top_p=7.0, temperature=-1.0)
    errors = []
    for side in (client, direct):
        with pytest.raises(dorad.InvalidArgument) as caught:
            side.generate(PROMPT, **bad)
        errors.append(caught.value)
    assert errors[0].reason and len(errors[0].violations) == 3
    assert (errors[0].reason, errors[0].message) == (errors[1].reason, errors[1].message)
    assert errors[0].violations == errors[1].violations
    with pytest.raises(dorad.NotFound) as caught:
        client.generate(PROMPT, adapter="b")
    assert caught.value.reason == "ADAPTER_NOT_FOUND"


def test_a_cancelled_call_ends_on_the_server(client, direct) -> None:
    streams = [client.stream(PROMPT, max_tokens=8000, ignore_eos=True) for _ in range(8)]
    for stream in streams:
        next(stream)
    # A client may have its first token before the server has published the step's figures.
    wait_until(lambda: direct.info().engine.running_sequences == 8, what="eight running sequences")
    for stream in streams:
        stream.close()
    wait_until(lambda: direct.info().engine.running_sequences == 0, what="no running sequences")


def test_a_deadline_passes(client, direct) -> None:
    with pytest.raises(dorad.DeadlineExceeded):
        client.generate(PROMPT, max_tokens=8000, ignore_eos=True, timeout=0.5)
    wait_until(lambda: direct.info().engine.running_sequences == 0, what="no running sequences")


def test_health_passes(client) -> None:
    assert client.health() == "serving"
    assert client.health("readiness") == "serving"


def test_the_public_port_has_no_admin_calls(client) -> None:
    calls = {
        "publish": lambda: client.publish("x", path="/srv/x", server_side=True),
        "retire": lambda: client.retire("a@1", force=True),
        "adapters": client.adapters,
        "pause": client.pause,
        "info": client.info,
        "abort": lambda: client.abort(all=True),
    }
    for name, call in calls.items():
        with pytest.raises(dorad.PermissionDenied, match="does not offer") as caught:
            call()
        assert caught.value.code == "PERMISSION_DENIED", name
    with pytest.raises(dorad.PermissionDenied):
        client._call(
            client._channel.unary_unary("/grpc.channelz.v1.Channelz/GetServers", bytes, bytes), b""
        )


def test_the_admin_port_asks_for_a_certificate(proxy) -> None:
    with (
        client_of(proxy, admin=True) as stranger,
        pytest.raises(dorad.PermissionDenied, match="certificate") as caught,
    ):
        stranger.adapters("a")
    assert caught.value.code == "UNAUTHENTICATED"


def test_the_admin_port_needs_an_adapter_and_has_no_control(proxy) -> None:
    with client_of(proxy, admin=True, certified=True) as operator:
        assert [version.label for version in operator.adapters("a")] == ["a@1"]
        with pytest.raises(dorad.Conflict, match="x-dorad-adapter"):
            operator.adapters()
        with pytest.raises(dorad.PermissionDenied):
            operator.pause()


def test_gateway_and_load_take_a_proxy_whose_servers_control_they_reach(zoo, tmp_path) -> None:
    admin = f"unix:{tmp_path / 'admin.sock'}"
    model = zoo.model_with_tokenizer("llama2")
    with (
        serve(model, settings={"server.admin_listen": admin}) as server,
        nginx([server.grpc]) as proxy,
    ):
        target = f"127.0.0.1:{proxy.public}"
        trust = {"DORAD_CA_FILE": str(proxy.authority.certificate)}
        run = subprocess.run(
            gateway_command(target), capture_output=True, text=True, env=environment(**trust),
            timeout=60,
        )  # fmt: skip
        assert run.returncode == 64 and "does not offer this call on this port" in run.stderr
        arguments = ["--tokenizer", model, "--admin-target", admin]
        with running_gateway(target, *arguments, scratch=tmp_path, **trust) as gateway:
            name = httpx.get(f"{gateway.url}/v1/models", timeout=30).json()["data"][0]["id"]
            body = {"model": name, "prompt": "x", "max_tokens": 2}
            answer = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=30)
            assert answer.status_code == 200, answer.text
        load = [sys.executable, "-c", "from dorad.cli import load_main; load_main()"]
        load += ["--target", target, "--requests", "2", "--output-tokens", "2"]
        for more, code in (([], 1), (["--admin-target", admin], 0)):
            run = zygote.run([*load, *more], env=environment(**trust))
            assert run.returncode == code, run


def test_clients_reconnect_after_keepalive_requests(server) -> None:
    changes = {"keepalive_requests 1000;": "keepalive_requests 20;"}
    with nginx([server.grpc], changes) as proxy, client_of(proxy) as client:
        results = client.generate_many([PROMPT] * 200, concurrency=16, max_tokens=2)
    assert len(results) == 200


def test_large_requests_are_refused_and_uploads_are_not(server, zoo) -> None:
    changes = {"client_max_body_size 64m;": "client_max_body_size 16k;"}  # of the admin port
    folder = zoo.adapter("slow", "dora", 3)
    assert (folder / "adapter_model.safetensors").stat().st_size > 100_000
    with nginx([server.grpc], changes) as proxy:
        with (
            client_of(proxy) as client,
            pytest.raises(dorad.Overloaded, match="larger than") as caught,
        ):
            client.generate([5] * 300_000, max_tokens=1)
        assert caught.value.code == "RESOURCE_EXHAUSTED"
        with client_of(proxy, admin=True, certified=True) as operator:
            version = operator.publish("large", path=folder)
        with client_of(proxy) as client:
            (sample,) = client.generate(PROMPT, adapter="large", max_tokens=2)
            assert sample.spans[0].digest == version.digest
        refused = [line for line in proxy.access_log() if '"grpc":"8"' in line]
        assert len(refused) == 1, "a request that is too large was sent again"


def test_score_may_be_as_large_as_the_server_takes(client) -> None:
    with pytest.raises(dorad.InvalidArgument) as caught:
        client.score([[5] * 65] * 16384)
    assert caught.value.reason == "SCORE_TOO_LARGE"
    with pytest.raises(dorad.Overloaded, match="larger than"):
        client.score([[5] * 90] * 16384)


def test_too_many_calls_from_an_address_are_told_to_come_back(server) -> None:
    changes = {"limit_conn dorad_calls 1024;": "limit_conn dorad_calls 4;"}
    with nginx([server.grpc], changes) as proxy:
        with client_of(proxy, retry_for=0) as client:
            streams = [client.stream(PROMPT, max_tokens=8000, ignore_eos=True) for _ in range(4)]
            for stream in streams:
                next(stream)
            with pytest.raises(dorad.Overloaded, match="too many calls"):
                client.generate(PROMPT, max_tokens=1)
            for stream in streams:
                stream.close()
        # gRPC's own retries obey the hint.
        with client_of(proxy) as client:
            calls = client.generate_many([PROMPT] * 16, concurrency=8, max_tokens=2)
            assert len(calls) == 16


# --- Two servers


def places(proxy, since: int) -> dict[str, set[str]]:
    """adapter → servers that answered its calls, from the access log's lines from `since` on."""
    found = defaultdict(set)
    for line in map(json.loads, proxy.access_log()[since:]):
        if line["grpc"] == "0" and "Generate" in line["call"]:
            # A call that was passed on lists every server it was tried with; the last one answered.
            found[line["adapter"]].add(line["server"].split(", ")[-1])
    return dict(found)


def ask_all(client, proxy, repeat: int = 3) -> dict[str, set[str]]:
    since = len(proxy.access_log())
    for name in NAMES * repeat:
        client.generate(PROMPT, adapter=name, max_tokens=1)
    wait_until(lambda: len(proxy.access_log()) >= since + len(NAMES) * repeat, what="the log")
    return places(proxy, since)


def test_adapters_stay_on_their_servers_until_one_dies(zoo, tmp_path) -> None:
    # Slow enough for a kill in the middle of a stream.
    adapters = dict.fromkeys(NAMES, zoo.adapter("slow", "dora"))
    lines = [command(zoo.model("slow"), adapters) for _ in range(2)]
    servers = [start(line, tmp_path / f"{i}.log") for i, line in enumerate(lines)]
    addresses = [server.grpc for server in servers]
    try:
        with nginx(addresses) as proxy, client_of(proxy, retry_for=0) as client:
            before = ask_all(client, proxy)
            assert before.keys() == set(NAMES)
            assert all(len(places) == 1 for places in before.values()), before
            homes = {name: next(iter(places)) for name, places in before.items()}
            counts = [sum(home == address for home in homes.values()) for address in addresses]
            assert min(counts) >= 1 and sum(counts) == 20, counts
            admitted = [
                server.metric("dorad_requests_admitted_total", kind="generate")
                for server in servers
            ]
            assert admitted == [3 * count for count in counts], "the log tells what was not"

            # The base model has no home.
            for _ in range(40):
                client.generate(PROMPT, max_tokens=1)
            wait_until(lambda: len(places(proxy, 60).get("", ())) == 2, what="both servers to work")

            victim = next(name for name in NAMES if homes[name] == addresses[0])
            stream = client.stream(PROMPT, adapter=victim, max_tokens=150, ignore_eos=True)
            next(stream)
            servers[0].process.send_signal(signal.SIGKILL)
            servers[0].process.wait()
            # Not UNAVAILABLE: nginx can only reset the stream by then.
            with pytest.raises(dorad.Internal, match="RST_STREAM"):
                list(stream)
            after = ask_all(client, proxy)
            assert after == {name: {addresses[1]} for name in NAMES}

            # It starts again, and its adapters return to it.
            again = command(zoo.model("slow"), adapters, {"server.grpc_listen": addresses[0]})
            servers[0].wire.close()
            servers[0] = start(again, tmp_path / "again.log")
            assert ask_all(client, proxy) == before
    finally:
        for server in servers:
            server.wire.close()
            server.stop()


def test_abort_finds_the_server_of_its_adapter_or_is_refused(zoo) -> None:
    adapters = dict.fromkeys(NAMES, zoo.adapter("slow", "dora"))
    with (
        serve(zoo.model("slow"), adapters) as one,
        serve(zoo.model("slow"), adapters) as other,
        nginx([one.grpc, other.grpc]) as proxy,
        client_of(proxy) as client,
        client_of(proxy, admin=True, certified=True) as operator,
    ):
        options = dict(max_tokens=8000, ignore_eos=True)
        streams = [
            client.stream(PROMPT, adapter=name, request_id=name, **options) for name in NAMES
        ]
        for stream in streams:
            next(stream)
        running = [server.wire.info().engine.running_sequences for server in (one, other)]
        assert min(running) >= 1 and sum(running) == len(NAMES), running
        for target in (dict(request_ids=NAMES), dict(all=True)):
            with pytest.raises(dorad.Conflict, match="call each server itself") as caught:
                operator.abort(**target)
            assert caught.value.code == "FAILED_PRECONDITION"
        assert [operator.abort(adapter=f"{name}@1") for name in NAMES] == [1] * len(NAMES)
        assert all(list(stream)[-1].finish.reason == "aborted" for stream in streams)


def test_nobody_there_is_unavailable(proxy) -> None:
    with (
        nginx(["127.0.0.1:1"]) as empty,
        client_of(empty, retry_for=0) as client,
        pytest.raises(dorad.Unavailable, match="no server takes the call") as caught,
    ):
        client.generate(PROMPT, max_tokens=1)
    assert caught.value.code == grpc.StatusCode.UNAVAILABLE.name
