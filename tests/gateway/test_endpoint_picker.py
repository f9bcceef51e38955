"""The endpoint picker, asked as by a proxy, in the published protocol."""

import asyncio
import contextlib
import re
import time

import dorad
import grpc
import numpy as np
import pytest
from dorad._routing import affinity, text_key
from dorad.fleet import manifest as m
from dorad.fleet.manifest_store import ManifestFile, change
from fake_server import FakeServer
from grpc_health.v1 import health_pb2
from lib.certificates import Authority
from lib.ext_proc import PORT, Exchange, completion, destination, exchange, pb, pick, picking
from lib.ext_proc import ExternalProcessorStub as Stub
from lib.gateway import ended_gateway, running_gateway
from lib.server import wait_until

AWAY = health_pb2.HealthCheckResponse.NOT_SERVING
BODY = completion("Hello", "a")
# Of Envoy, by message: names and numbers of the fields in use.
PUBLISHED = """
ProcessingRequest: request_headers=2 response_headers=3 request_body=4 response_body=5
    request_trailers=6 response_trailers=7 metadata_context=8 observability_mode=10
    protocol_config=11
ProtocolConfiguration: request_body_mode=1 response_body_mode=2
Metadata: filter_metadata=1
HttpHeaders: headers=1 end_of_stream=3
HttpBody: body=1 end_of_stream=2
HttpTrailers: trailers=1
HeaderMap: headers=1
HeaderValue: key=1 raw_value=3
ProcessingResponse: request_headers=1 response_headers=2 request_body=3 response_body=4
    request_trailers=5 response_trailers=6 immediate_response=7 dynamic_metadata=8
HeadersResponse: response=1
BodyResponse: response=1
CommonResponse: header_mutation=2 body_mutation=3 clear_route_cache=5
HeaderMutation: set_headers=1
HeaderValueOption: header=1 append_action=3
BodyMutation: streamed_response=3
StreamedBodyResponse: body=1 end_of_stream=2
ImmediateResponse: status=1 headers=2 body=3
HttpStatus: code=1
"""


@pytest.fixture
def servers():
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(FakeServer(host=f"127.0.0.{n}")) for n in (1, 2, 3)]


@pytest.fixture
def stub(servers, tmp_path):
    with picking([server.target for server in servers], tmp_path) as (stub, *_):
        yield stub


def test_messages_have_the_published_numbers():
    messages = re.findall(r"^(\w+): ([^:]*)$", PUBLISHED, re.M)
    found = {name: dict(re.findall(r"(\w+)=(\d+)", fields)) for name, fields in messages}
    ours = {
        name: {field.name: str(field.number) for field in message.fields}
        for name, message in pb.DESCRIPTOR.message_types_by_name.items()
        if message.fields
    }
    assert ours == found
    modes = "NONE STREAMED BUFFERED BUFFERED_PARTIAL FULL_DUPLEX_STREAMED GRPC"
    assert pb.BodySendMode.keys() == modes.split() and pb.BodySendMode.values() == [*range(6)]
    service = pb.DESCRIPTOR.services_by_name["ExternalProcessor"]
    assert service.full_name == "envoy.service.ext_proc.v3.ExternalProcessor"


def pod(server):
    return f"{server.host}:{PORT}"


def home(servers, model, text):
    key = text_key(model, text)
    return pod(max(servers, key=lambda server: affinity(server.target, key)))


def test_requests_that_begin_alike_go_to_one_pod(stub, servers):
    found = set()
    for n in range(12):
        address = home(servers, "a", f"{n} begins")
        found.add(address)
        assert pick(stub, completion(f"{n} begins", "a")) == address
    assert len(found) > 1
    long = "x" * 2000
    assert pick(stub, completion(long + "1")) == pick(stub, completion(long + "2"))
    assert len({pick(stub, completion("same", f"adapter-{n}")) for n in range(12)}) > 1


def test_a_pod_gets_no_more_than_its_bound(stub):
    """1.25 times the mean of the requests whose streams have not ended."""
    running, chosen = [], []
    for _ in range(6):
        it = Exchange(stub)
        it.headers()
        it.body(BODY)
        chosen.append(destination(it.next()))
        assert it.next().request_body.response.body_mutation.streamed_response.body == BODY
        running.append(it)
    # At most ceil(1.25 * n / 3) of n: the second request does not go where the first one is.
    assert chosen[0] != chosen[1]
    assert max(chosen.count(address) for address in chosen) == 3
    for it in running:
        it.end()
        assert list(it.call) == []
    assert pick(stub, BODY) == chosen[0]


@pytest.mark.parametrize("mode", [None, "FULL_DUPLEX_STREAMED"])
def test_what_passes_is_not_changed(stub, mode):
    """A proxy that does not say how it sends bodies is one of the protocol: full duplex."""
    with exchange(stub, mode=mode) as it:
        it.headers()
        it.body(b'{"model":', b' "a"}', end_of_stream=False)
        it.send(request_trailers=pb.HttpTrailers())
        destination(it.next())
        bodies = [it.next().request_body.response.body_mutation for _ in range(2)]
        sent = [(b.streamed_response.body, b.streamed_response.end_of_stream) for b in bodies]
        assert sent == [(b'{"model":', False), (b' "a"}', False)]
        assert it.next().WhichOneof("response") == "request_trailers"
        it.send(response_headers=pb.HttpHeaders())
        it.send(response_body=pb.HttpBody(body=b"data: 1"))
        it.send(response_body=pb.HttpBody(body=b"", end_of_stream=True))
        assert it.next().WhichOneof("response") == "response_headers"
        for body, end in ((b"data: 1", False), (b"", True)):
            found = it.next().response_body.response.body_mutation.streamed_response
            assert (found.body, found.end_of_stream) == (body, end)
        it.send(response_trailers=pb.HttpTrailers())
        assert it.next().WhichOneof("response") == "response_trailers"


def test_a_proxy_that_buffers_gets_one_answer_for_each_message(stub, servers):
    with exchange(stub, mode="BUFFERED") as it:
        it.headers()
        first = it.next()
        assert first.WhichOneof("response") == "request_headers"
        assert not first.request_headers.response.header_mutation.set_headers
        it.body(completion("Hello", "a"))
        assert destination(it.next()) == home(servers, "a", "Hello")
        it.send(response_headers=pb.HttpHeaders())
        it.send(response_body=pb.HttpBody(body=b"{}", end_of_stream=True))
        assert it.next().WhichOneof("response") == "response_headers"
        answer = it.next().response_body.response
        assert not answer.HasField("body_mutation")


@pytest.mark.parametrize("mode", ["NONE", "STREAMED"])
def test_without_a_body_to_wait_for_any_pod_will_do(stub, servers, mode):
    with exchange(stub, mode=mode) as it:
        it.headers(end_of_stream=mode == "NONE")
        assert destination(it.next()) in map(pod, servers)
        if mode == "STREAMED":
            it.body(b"{}", b"{}")
            assert [it.next().WhichOneof("response") for _ in range(2)] == ["request_body"] * 2


@pytest.mark.parametrize("body", [b"no JSON", b"[]", b'{"model": 7}', b"[" * 100_000])
def test_a_body_that_the_picker_cannot_read_is_the_pods_business(stub, servers, body):
    assert pick(stub, body) in map(pod, servers)


def test_only_pods_of_the_subset_are_chosen(stub, servers):
    for server in servers:
        assert pick(stub, BODY, subset=["10.1.1.1:8000", pod(server)]) == pod(server)
    for subset in ([], ["10.1.1.1:8000"]):
        with exchange(stub, subset=subset) as it:
            it.headers()
            it.body(BODY)
            assert it.next().immediate_response.status.code == 503


def test_a_long_body_is_refused(servers, tmp_path):
    with picking([servers[0].target], tmp_path, "--max-body-bytes", 1024) as (stub, *_):
        with exchange(stub) as it:
            it.headers()
            it.body(b"x" * 1000, b"x" * 25)
            assert it.next().immediate_response.status.code == 413
        assert pick(stub, b"x" * 1024) == pod(servers[0])


def test_servers_that_drain_are_passed_over_and_none_is_503(stub, servers):
    first = next(server for server in servers if pod(server) == pick(stub, BODY))
    first.health.set("", AWAY)
    wait_until(lambda: pick(stub, BODY) != pod(first), 30)
    for server in servers:
        server.health.set("", AWAY)

    def none_is_ready():
        with exchange(stub) as it:
            it.headers(end_of_stream=True)
            answer = it.next()
            return answer.immediate_response.status.code == 503

    wait_until(none_is_ready, 30)


def test_members_of_a_fleet_are_followed_and_those_that_lag_passed_over(servers, tmp_path):
    store = ManifestFile(tmp_path / "fleet.json")

    def apply(how, *arguments):
        asyncio.run(change(store, lambda manifest: how(manifest, *arguments)))

    until = time.time() + 600
    apply(m.renew, [servers[0].target, servers[1].target], until)
    texts = [f"text {n}" for n in range(12)]
    with picking([], tmp_path, "--fleet", tmp_path / "fleet.json") as (stub, *_):

        def found():
            return {pick(stub, completion(text, "a")) for text in texts}

        assert found() == {pod(servers[0]), pod(servers[1])}
        apply(m.renew, [servers[2].target], until)
        wait_until(lambda: found() == set(map(pod, servers)), 30)
        apply(m.leave, servers[0].target)
        wait_until(lambda: found() == {pod(servers[1]), pod(servers[2])}, 30)
        release = m.Release(1, m.Files("a" * 64, "b" * 64, 7), "upload")
        apply(m.prepare, "a", m.Prepared(release, "one", 0.0))
        with dorad.Client(servers[1].target) as client:
            version = client.publish("a", tensors={"w": np.ones((2, 2), np.float32)}, config={})
        apply(m.commit, "a", 1, "one", version.digest)
        wait_until(lambda: found() == {pod(servers[1])}, 30)


def test_it_speaks_tls(servers, tmp_path):
    authority = Authority(tmp_path)
    certificate, key = authority.issue("localhost")
    tls = ["--tls-cert", certificate, "--tls-key", key]
    trust = grpc.ssl_channel_credentials(authority.certificate.read_bytes())
    line = ["--listen", "127.0.0.1:0", "--endpoint-port", PORT, *tls]
    with (
        running_gateway(
            servers[0].target, *line, scratch=tmp_path, program="endpoint-picker"
        ) as running,
        grpc.secure_channel(running.grpc, trust) as channel,
    ):
        assert pick(Stub(channel), BODY) == pod(servers[0])


def test_its_health_is_that_of_the_protocol(servers, tmp_path):
    with picking([servers[0].target], tmp_path) as (_, health, _):
        for service in ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
            request = health_pb2.HealthCheckRequest(service=service)
            answer = health.Check(request, timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError):
            health.Check(health_pb2.HealthCheckRequest(service="other"), timeout=10)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "either --fleet or --target"),
        (["--fleet", "x", "--target", "127.0.0.1:1"], "either --fleet or --target"),
        (["--target", "10.0.0.1:1"], "in plain text"),
        (["--target", "127.0.0.1:1", "--listen", "0.0.0.0:0"], "not on the loopback"),
    ],
)
def test_settings_that_do_not_fit_are_a_usage_error(arguments, why):
    run = ended_gateway([], *arguments, program="endpoint-picker")
    assert run.returncode == 64 and why in run.stderr, run
