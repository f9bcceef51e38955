"""The end of the gateway beside requests in flight."""

import time

import grpc
import httpx
import pytest
from lib.gateway import CLOCK_STEP, running_gateway
from lib.gateway_clients import COMPLETION, grpc_stream, http_stream, stuck_readers
from lib.server import wait_until
from tritonclient.grpc import service_pb2 as pb  # A process can have only these or the gateway's.
from tritonclient.grpc import service_pb2_grpc as pb_grpc


def test_requests_in_flight_finish_at_sigterm(fake, folder, tmp_path):
    fake.token_delay = 0.1
    with running_gateway(fake.target, "--tokenizer", folder, scratch=tmp_path) as running:
        body = {**COMPLETION, "max_tokens": 10, "stream": True}
        with (
            httpx.Client(base_url=running.url, timeout=20) as client,
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            lines = answer.iter_lines()
            next(lines)
            running.process.terminate()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert running.process.wait(60) == 0


def test_the_gateway_ends_in_peace_beside_a_reader_that_stops_reading(fake, fake_gateway):
    fake.endless, fake.token_delay = True, 0.05
    with stuck_readers(fake_gateway, 1):
        wait_until(lambda: fake.running == 1, what="the stream has begun")
        time.sleep(1)  # Its buffers are full.
        fake_gateway.process.terminate()
        assert fake_gateway.process.wait(60) == 0  # The fixture looks at the log.


@pytest.fixture
def both_doors(fake, folder, tmp_path):
    """A gateway with a gRPC door, and streams that do not end by themselves.

    Its time to finish is more than one step of its clock, and less than two.
    """
    fake.endless, fake.token_delay = True, 0.02
    arguments = ["--tokenizer", folder, "--grpc-listen", "127.0.0.1:0"]
    arguments += ["--drain", 1.5 * CLOCK_STEP, "--timeout", 100 * CLOCK_STEP]
    with running_gateway(fake.target, *arguments, scratch=tmp_path, stepped_clock=True) as running:
        yield running


def grpc_code(channel):
    """How a new call ends."""
    try:
        stub = pb_grpc.GRPCInferenceServiceStub(channel)
        stub.ServerLive(pb.ServerLiveRequest(), timeout=5)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def ends_its_doors(gateway):
    """SIGTERM, until gRPC takes no calls any more."""
    with grpc.insecure_channel(gateway.grpc) as channel:
        assert grpc_code(channel) is grpc.StatusCode.OK
        gateway.process.terminate()
        gone = grpc.StatusCode.UNAVAILABLE
        wait_until(lambda: grpc_code(channel) is gone, 20, "gRPC takes no calls")


def test_no_door_takes_requests_while_one_finishes_its_own(both_doors):
    with http_stream(both_doors) as lines:
        ends_its_doors(both_doors)
        with grpc.insecure_channel(both_doors.grpc) as another:
            assert grpc_code(another) is grpc.StatusCode.UNAVAILABLE
        assert next(lines) is not None and both_doors.process.poll() is None


def test_the_time_to_finish_is_that_of_all_doors_together(both_doors):
    with grpc_stream(both_doors) as messages:
        with http_stream(both_doors) as lines:
            ends_its_doors(both_doors)
            both_doors.step_clock()
            # Both go on: the time is not over.
            for _ in range(10):
                assert next(lines) is not None and next(messages)
        # HTTP has ended. gRPC's time runs from the signal on; from here on, a step would not do.
        assert next(messages) and both_doors.process.poll() is None
        both_doors.step_clock()
        assert both_doors.process.wait(60) == 0


def test_a_second_signal_ends_requests_in_flight_over_grpc(both_doors):
    with grpc_stream(both_doors) as messages:
        ends_its_doors(both_doors)
        assert next(messages) and both_doors.process.poll() is None
        both_doors.process.terminate()
        assert both_doors.process.wait(60) == 0  # The drain takes 600 s.
