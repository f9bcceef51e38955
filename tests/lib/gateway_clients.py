"""Requests to the gateway, and clients that stream."""

import contextlib
import json
import socket

import grpc
import httpx
from tritonclient.grpc import service_pb2 as pb  # A process can have only these or the gateway's.
from tritonclient.grpc import service_pb2_grpc as pb_grpc

COMPLETION = {"model": "fake-model", "prompt": [5, 6], "max_tokens": 4}


@contextlib.contextmanager
def stuck_readers(running, count):
    """Streams whose readers take nothing."""
    host, _, port = running.http.rpartition(":")
    long = {"prompt": [40] * 30_000, "n": 128, "return_token_ids": True}  # More than buffers take.
    body = json.dumps({**COMPLETION, **long, "stream": True})
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            reader = stack.enter_context(socket.socket())
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect((host, int(port)))
            reader.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        yield


@contextlib.contextmanager
def http_stream(gateway):
    """Its lines; the first one has come."""
    body = {**COMPLETION, "stream": True}
    with (
        httpx.Client(base_url=gateway.url, timeout=20) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        yield lines


@contextlib.contextmanager
def grpc_stream(gateway):
    """Its messages; the first one has come, and few are kept for who does not read."""
    request = pb.ModelInferRequest(model_name="fake-model")
    request.inputs.add(name="input_ids", datatype="INT64", shape=[1])
    request.inputs[0].contents.int64_contents.append(5)
    small = [("grpc.http2.lookahead_bytes", 4096), ("grpc.http2.bdp_probe", 0)]
    with grpc.insecure_channel(gateway.grpc, options=small) as channel:
        stub = pb_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(iter([request]), timeout=60)
        next(call)
        yield call
