"""The standard services: health, reflection, channelz."""

import grpc
import pytest
from dorad.v1 import adapters_pb2, control_pb2, inference_pb2
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from lib.server import Server, device, serve

SERVICES = [
    "dorad.v1.InferenceService",
    "dorad.v1.AdapterService",
    "dorad.v1.ControlService",
]


@pytest.fixture(scope="module")
def server(zoo):
    with serve(zoo.model("llama2")) as running:
        yield running


@pytest.mark.parametrize("service", ["", *SERVICES])
def test_health_of_each_service(server: Server, service: str) -> None:
    stub = health_pb2_grpc.HealthStub(server.wire.channel)
    response = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
    assert response.status == health_pb2.HealthCheckResponse.SERVING


def test_health_of_an_unknown_service(server: Server) -> None:
    stub = health_pb2_grpc.HealthStub(server.wire.channel)
    with pytest.raises(grpc.RpcError) as caught:
        stub.Check(health_pb2.HealthCheckRequest(service="dorad.v1.Nothing"), timeout=10)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


def test_health_watch_reports_at_once(server: Server) -> None:
    stub = health_pb2_grpc.HealthStub(server.wire.channel)
    call = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICES[0]), timeout=10)
    assert next(call).status == health_pb2.HealthCheckResponse.SERVING
    call.cancel()


def test_health_watch_of_an_unknown_service_says_so(server: Server) -> None:
    stub = health_pb2_grpc.HealthStub(server.wire.channel)
    call = stub.Watch(health_pb2.HealthCheckRequest(service="dorad.v1.Nothing"), timeout=10)
    assert next(call).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    call.cancel()


def test_health_watchers_learn_of_the_end_and_do_not_delay_it(zoo) -> None:
    with serve(zoo.model("llama2")) as server:
        stub = health_pb2_grpc.HealthStub(server.wire.channel)
        call = stub.Watch(health_pb2.HealthCheckRequest(), timeout=60)
        assert next(call).status == health_pb2.HealthCheckResponse.SERVING
        liveness = stub.Watch(health_pb2.HealthCheckRequest(service="liveness"), timeout=60)
        assert next(liveness).status == health_pb2.HealthCheckResponse.SERVING
        server.process.terminate()
        assert next(call).status == health_pb2.HealthCheckResponse.NOT_SERVING
        for ended in (call, liveness):
            with pytest.raises(grpc.RpcError) as caught:
                next(ended)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            assert "the server is ending" in caught.value.details()
        assert server.process.wait(60) == 0


def reflect(server: Server, **request):
    stub = reflection_pb2_grpc.ServerReflectionStub(server.wire.channel)
    requests = iter([reflection_pb2.ServerReflectionRequest(**request)])
    return next(stub.ServerReflectionInfo(requests, timeout=10))


def test_reflection_lists_the_services(server: Server) -> None:
    listed = {
        item.name for item in reflect(server, list_services="").list_services_response.service
    }
    assert listed >= {*SERVICES, "grpc.health.v1.Health"}


@pytest.mark.parametrize(
    "module", [inference_pb2, adapters_pb2, control_pb2], ids=lambda module: module.__name__
)
def test_reflection_serves_our_descriptors(server: Server, module) -> None:
    (service,) = module.DESCRIPTOR.services_by_name.values()
    response = reflect(server, file_containing_symbol=service.full_name)
    files = {
        file.name: file
        for file in map(
            descriptor_pb2.FileDescriptorProto.FromString,
            response.file_descriptor_response.file_descriptor_proto,
        )
    }
    methods = {method.name for method in files[module.DESCRIPTOR.name].service[0].method}
    assert methods == {method.name for method in service.methods}


def channelz(channel: grpc.Channel) -> bytes:
    call = channel.unary_unary(
        "/grpc.channelz.v1.Channelz/GetServers",
        request_serializer=lambda request: request,
        response_deserializer=lambda response: response,
    )
    return call(b"", timeout=10)


def test_channelz_knows_this_server(server: Server) -> None:
    assert len(channelz(server.wire.channel)) > 4


def test_admin_calls_can_have_a_listener_of_their_own(zoo, tmp_path) -> None:
    socket = f"unix:{tmp_path / 'admin.sock'}"
    with serve(zoo.model("llama2"), None, {"server.admin_listen": socket}) as server:
        with grpc.insecure_channel(socket) as admin:
            assert len(channelz(admin)) > 4
            stub = control_pb2_grpc_stub(admin)
            assert stub.GetInfo(control_pb2.GetInfoRequest(), timeout=10).device == device()
        for call in (lambda: channelz(server.wire.channel), server.wire.pause):
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        assert len(server.wire.generate([5, 6], max_tokens=2, ignore_eos=True)[0].tokens) == 2


def control_pb2_grpc_stub(channel: grpc.Channel):
    from dorad.v1 import control_pb2_grpc

    return control_pb2_grpc.ControlServiceStub(channel)
