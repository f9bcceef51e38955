"""Memory that changes too early, requests that lie and foreign sessions are refused."""

import os
import subprocess

import grpc
import numpy as np
import pytest
from dorad._shared_memory_socket import tensor_digest
from dorad.v1 import adapters_pb2, types_pb2
from lib.server import command, environment, serve, wait_until
from lib.shared_memory import KIND, refused
from lib.trainer import SharedMemory, Trainer, registration


def test_memory_overwritten_too_early_is_detected_when_asked(server, zoo, socket_path) -> None:
    with Trainer(socket_path, zoo.adapter("slow", KIND)) as trainer:
        right = server.wire.publish_memory(trainer.request("early")).adapter
        hashed = trainer.request("early")
        spans = {name: entry["data_offsets"] for name, entry in trainer.header.items()}
        for tensor in hashed.tensors:
            tensor.digest = tensor_digest(trainer.memory[slice(*spans[tensor.name])])
        expected = trainer.request("early", expected_digest=right.digest)
        for message in (hashed, expected):
            assert server.wire.publish_memory(message).adapter.digest == right.digest
        # The trainer's next step has begun.
        name = min(spans)
        trainer.memory[spans[name][0] : spans[name][0] + 4] = np.float32(0.125).tobytes()
        for message, field in ((hashed, name), (expected, "expected_digest")):
            refusal = refused(server, message)
            assert refusal.reason == "SHARED_MEMORY_DIGEST_MISMATCH"
            assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
            assert [where for where, _, _ in refusal.violations] == [field]
        # What nobody asked to be checked is what was read, and its digest says so.
        unchecked = server.wire.publish_memory(trainer.request("early")).adapter
    assert unchecked.digest != right.digest
    assert server.wire.adapter("early").version == 6
    states = [item.state for item in server.wire.list_adapters("early")]
    ready, failed = types_pb2.ADAPTER_STATE_READY, types_pb2.ADAPTER_STATE_FAILED
    assert states == [ready] * 3 + [failed] * 2 + [ready]


def test_memory_that_became_shorter_is_refused_and_the_server_lives(
    server, zoo, socket_path
) -> None:
    with Trainer(socket_path, zoo.adapter("slow", KIND)) as trainer:
        os.ftruncate(trainer.fd, 4096)
        refusal = refused(server, trainer.request("shorter"))
    assert refusal.reason == "SHARED_MEMORY_MEMORY_INVALID"
    assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
    assert len(server.wire.generate([1, 2, 3], max_tokens=2, ignore_eos=True)[0].tokens) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"memory": 1},
        {"offset": 2**63},
        {"offset": 2**64 - 4},
        {"dtype": adapters_pb2.TENSOR_DTYPE_UNSPECIFIED},
        {"dtype": 17},
        {"shape": [2**40, 2**40]},
        {"shape": [2**63, 2]},
        {"shape": [1] * 9},
        {"name": ""},
        {"name": "x" * 513},
        {"digest": b"short"},
    ],
    ids=str,
)
def test_a_tensor_that_cannot_be_there_is_refused(server, zoo, socket_path, change) -> None:
    with Trainer(socket_path, zoo.adapter("slow", KIND)) as trainer:
        message = trainer.request("lies")
        tensor = message.tensors[3]
        for key, value in change.items():
            if key == "shape":
                del tensor.shape[:]
                tensor.shape.extend(value)
            else:
                setattr(tensor, key, value)
        refusal = refused(server, message)
    assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
    assert refusal.reason == "SHARED_MEMORY_TENSOR_INVALID"
    assert [field for field, _, _ in refusal.violations] == ["tensors[3]"]
    assert not server.wire.list_adapters("lies")


def test_the_rest_of_the_request_is_checked_as_that_of_an_upload(server, zoo, socket_path) -> None:
    with Trainer(socket_path, zoo.adapter("slow", KIND)) as trainer:
        bad = trainer.request(
            "Bad!", version=0, tags={"": ""}, adapter_config_json="", expected_digest="12"
        )
        assert {reason for _, reason, _ in refused(server, bad).violations} == {
            "ADAPTER_NAME_INVALID",
            "ADAPTER_VERSION_INVALID",
            "TAGS_INVALID",
            "PUBLISH_CONFIG_SIZE",
            "SHARED_MEMORY_DIGEST_INVALID",
        }
        nothing = trainer.request("none", tensors=[])
        assert refused(server, nothing).reason == "SHARED_MEMORY_TENSORS_INVALID"
        twice = trainer.request("twice")
        twice.tensors.append(twice.tensors[0])
        assert refused(server, twice).reason == "SAFETENSORS_DUPLICATE_KEY"
        fewer = trainer.request("fewer")
        missing = fewer.tensors.pop().name
        refusal = refused(server, fewer)
        assert {field for field, _, _ in refusal.violations} == {missing}
        typed = trainer.request("typed", adapter_config_json="")
        typed.peft_config.r = 64
        assert refused(server, typed).violations[0][0].startswith("peft_config.")
        text = trainer.request("text", adapter_config_json="{}")
        assert refused(server, text).reason == "ADAPTER_CONFIG_MISSING_FIELD"


def test_tensors_that_overlap_cannot_have_more_bytes_than_any_memory(server, socket_path) -> None:
    size = 1 << 48  # of which nothing is ever written
    fd = os.memfd_create("huge")
    os.ftruncate(fd, size)
    shared_memory = SharedMemory(socket_path)
    try:
        code, memory, session_token, text = shared_memory.send(registration(size), [fd])
        assert code == 0, text
        # The last two sums do not fit into 64 bits, signed and unsigned.
        for count, reason in (
            (1, "ADAPTER_TOO_LARGE"),
            (2, "SHARED_MEMORY_TENSORS_INVALID"),
            (1 << 15, "SHARED_MEMORY_TENSORS_INVALID"),
            (1 << 16, "SHARED_MEMORY_TENSORS_INVALID"),
        ):
            tensors = [
                adapters_pb2.MemoryTensor(
                    name=f"t{i}",
                    dtype=adapters_pb2.TENSOR_DTYPE_F32,
                    shape=[size // 4],
                    memory=memory,
                )
                for i in range(count)
            ]
            message = adapters_pb2.PublishFromMemoryRequest(
                name="huge", session_token=session_token, tensors=tensors, adapter_config_json="{}"
            )
            assert refused(server, message).reason == reason, count
    finally:
        shared_memory.close()
        os.close(fd)


def test_only_the_session_token_of_an_open_connection_is_good(server, zoo, socket_path) -> None:
    def has_no_connection() -> bool:
        return server.metric("dorad_shared_memory_connections") == 0

    wait_until(has_no_connection, what="the end of earlier connections")
    with Trainer(socket_path, zoo.adapter("slow", KIND)) as trainer:
        for session_token in (
            b"",
            bytes(16),
            trainer.session_token[:-1],
            trainer.session_token + b"x",
        ):
            refusal = refused(server, trainer.request("foreign", session_token=session_token))
            assert refusal.reason == "SHARED_MEMORY_SESSION_UNKNOWN"
            assert refusal.code == grpc.StatusCode.NOT_FOUND
        message = trainer.request("foreign")
    # A publish that overtakes the end of the connection would leave a failed version.
    wait_until(has_no_connection, what="the end of the connection")
    assert refused(server, message).reason == "SHARED_MEMORY_SESSION_UNKNOWN"
    assert not server.wire.list_adapters("foreign")


def test_without_a_shared_memory_socket_nothing_is_published_from_memory(zoo, socket_path) -> None:
    with serve(zoo.model("slow")) as plain:
        message = adapters_pb2.PublishFromMemoryRequest(name="a", session_token=bytes(16))
        refusal = refused(plain, message)
    assert refusal.reason == "SHARED_MEMORY_NOT_CONFIGURED"
    assert refusal.code == grpc.StatusCode.FAILED_PRECONDITION


def test_the_socket_is_the_owners_alone_and_no_second_server_takes_it(server, zoo, socket_path):
    assert os.stat(socket_path).st_mode & 0o777 == 0o600
    line = command(zoo.model("slow"), settings={"server.shared_memory_socket": socket_path})
    other = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=60)
    assert other.returncode != 0 and "shared-memory socket: " in other.stderr
    with Trainer(socket_path, zoo.adapter("slow", KIND)) as trainer:
        server.wire.publish_memory(trainer.request("still"))
