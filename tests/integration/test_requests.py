"""How requests come in: of known callers only, and within bounds of size and time."""

import hashlib
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import dorad
import grpc
import pytest
from dorad.v1 import adapters_pb2, control_pb2, inference_pb2
from lib.http2 import Http2
from lib.server import Server, serve, wait_until
from lib.tiers import deep
from lib.tokens import write_tokens
from lib.wire import Failure, failure, publish_parts

PROMPT = [11, 12, 13, 14, 15]
RAW = dict(request_serializer=bytes, response_deserializer=bytes)
SCORE = "/dorad.v1.InferenceService/Score"
HEALTH = "/grpc.health.v1.Health/Check"
HEALTH_METHODS = [HEALTH, "/grpc.health.v1.Health/Watch"]
PUBLISH = "/dorad.v1.AdapterService/Publish"
METHODS = [
    f"/{service.full_name}/{method.name}"
    for file in (inference_pb2, adapters_pb2, control_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if not method.client_streaming
]


@pytest.fixture(scope="module")
def server(zoo):
    with serve(zoo.model("llama2"), None, {"server.message_timeout_seconds": 1}) as running:
        yield running


def refused(call: grpc.Call) -> Failure:
    with pytest.raises(grpc.RpcError) as caught:
        call.result()
    return failure(caught.value)


def send(server: Server, method: str, message: bytes, timeout: float = 60) -> grpc.Future:
    return server.wire.channel.unary_unary(method, **RAW).future(message, timeout=timeout)


@contextmanager
def peak_growth(server: Server) -> Iterator[list[int]]:
    """Appends how many bytes more than before the server's memory came to have."""

    def read(key: str) -> int:
        lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
        (value,) = [int(line.split()[1]) for line in lines if line.startswith(key + ":")]
        return value << 10

    growth: list[int] = []
    Path(f"/proc/{server.pid}/clear_refs").write_text("5")
    before = read("VmRSS")
    yield growth
    growth.append(read("VmHWM") - before)


def good(server: Server) -> bool:
    return len(server.wire.generate(PROMPT, max_tokens=2, ignore_eos=True)[0].tokens) == 2


def test_messages_of_strangers_are_not_read(zoo, tmp_path, figures) -> None:
    tokens = tmp_path / "tokens.yaml"
    digest = hashlib.sha256(b"a-token").hexdigest()
    token = f"{{name: a, sha256: {digest}, tenant: t, roles: [infer]}}"
    tokens.write_text(f"tokens:\n- {token}\ntenants:\n  t: {{}}\n")
    tokens.chmod(0o600)
    with serve(zoo.model("llama2"), None, {"security.tokens_file": tokens}) as server:
        message = bytes(60 << 20)
        with peak_growth(server) as growth:
            calls = [send(server, SCORE, message) for _ in range(24)]
            assert {refused(call).reason for call in calls} == {"TOKEN_MISSING"}
        figures.append(f"24 calls of 60 MiB without a token: {growth[0] >> 20} MiB at the most")
        assert growth[0] < 256 << 20


GET_INFO = "/dorad.v1.ControlService/GetInfo"


@pytest.mark.parametrize("method", [*HEALTH_METHODS, GET_INFO])
def test_unfinished_messages_are_ended_and_harm_no_tenant(
    zoo, tmp_path, figures, method: str
) -> None:
    """Of strangers, and to a method with a small request: gRPC keeps what has arrived of each."""
    count = 24 if deep() else 12
    tokens = tmp_path / "tokens.yaml"
    write_tokens(tokens, {"a": ("t", ["infer"]), "b": ("u", ["infer"])}, {"t": {}, "u": {}})
    token = [("authorization", "Bearer b-token")] if method == GET_INFO else []

    def attack() -> dict[str, str]:
        with Http2(server.grpc, tls=False, timeout=60) as peer:
            return peer.unfinished_call(method, 60 << 20, *token)

    with (
        serve(zoo.model("llama2"), None, {"security.tokens_file": tokens}) as server,
        dorad.Client(server.grpc, token="a-token", retry_for=0) as tenant,
        ThreadPoolExecutor(count) as pool,
    ):
        assert tenant.generate(PROMPT, max_tokens=1)
        with peak_growth(server) as growth:
            attacks = [pool.submit(attack) for _ in range(count)]
            while not all(one.done() for one in attacks):
                assert tenant.generate(PROMPT, max_tokens=1)
        assert tenant.generate(PROMPT, max_tokens=1)
        # A slow sender is ended by time.
        answers = [one.result()["grpc-message"] for one in attacks]
        too_large = [text for text in answers if "bytes arrived before the request was" in text]
        late = [text for text in answers if text.startswith("no message arrived within")]
        assert too_large and len(too_large) + len(late) == len(answers), set(answers)
        figures.append(f"{count} messages of 60 MiB less a byte to {method}: {growth[0] >> 20} MiB")
        assert growth[0] < 256 << 20


def test_a_large_upload_ends_no_small_read_beside_it(server) -> None:
    """The bytes of one connection do not tell their call, so they may be those of the upload."""
    image = bytes(48 << 20)
    begin = adapters_pb2.PublishBegin(
        name="large", adapter_config_json="{}", safetensors_size=len(image)
    )
    *parts, _commit = publish_parts(begin, image)
    with held_back() as nothing:
        check = server.wire.channel.stream_unary(HEALTH, **RAW).future(nothing, timeout=60)
        with pytest.raises(grpc.RpcError) as ended:
            server.wire.adapters.Publish(iter(parts), timeout=60)
        assert failure(ended.value).reason == "PUBLISH_INCOMPLETE"
        assert refused(check).reason == "MESSAGE_TIMEOUT"


def test_what_a_method_cannot_need_is_not_parsed(server, figures) -> None:
    # Two bytes for each sequence, which would take some 60 in memory.
    with peak_growth(server) as growth:
        refusal = refused(send(server, SCORE, b"\x12\x00" * (30 << 20)))
    assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
    assert refusal.reason == "REQUEST_TOO_LARGE"
    figures.append(f"30 million empty sequences: {growth[0] >> 20} MiB at the most")
    assert growth[0] < 256 << 20
    for method in [*METHODS, *HEALTH_METHODS, PUBLISH]:
        assert refused(send(server, method, bytes(6 << 20))).reason == "REQUEST_TOO_LARGE", method
    assert good(server)


@pytest.mark.parametrize("method", [SCORE, HEALTH])
def test_nothing_is_inflated(server, figures, method: str) -> None:
    size = 256 if deep() else 128
    with grpc.insecure_channel(server.grpc, compression=grpc.Compression.Gzip) as channel:
        call = channel.unary_unary(method, **RAW)
        with peak_growth(server) as growth:
            refusal = refused(call.future(bytes(size << 20), timeout=60))
    assert refusal.code == grpc.StatusCode.UNIMPLEMENTED
    figures.append(
        f"{size} MiB of zeros, compressed, to {method}: {growth[0] >> 20} MiB at the most"
    )
    assert growth[0] < 64 << 20


def test_small_messages_of_many_fields_are_not_parsed(server) -> None:
    refusal = refused(send(server, SCORE, b"\x12\x00" * 1_200_000))
    assert refusal.reason == "REQUEST_TOO_LARGE" and "fields" in refusal.message
    # What no message of ours has, and no count sees into.
    group = b"\x7b" + b"\x7a\x00" * 1000 + b"\x7c"
    assert refused(send(server, SCORE, group)).reason == "REQUEST_MALFORMED"
    # Bytes that are not UTF-8 are refused without a word in the log.
    assert refused(send(server, HEALTH, b"\x0a\x01\xff")).reason == "REQUEST_MALFORMED"
    assert all(line.startswith("{") for line in server.log().splitlines())


@pytest.mark.parametrize("method", [SCORE, HEALTH])
def test_reading_has_a_bound_of_its_own(zoo, figures, method: str) -> None:
    with serve(zoo.model("llama2"), None, {"server.max_message_bytes": 8 << 20}) as server:
        with peak_growth(server) as growth:
            refusal = refused(send(server, method, bytes(500 << 20)))
        # The server ends it, or gRPC, whose quota is full.
        exhausted = refusal.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert exhausted or refusal.reason == "REQUEST_TOO_LARGE"
        figures.append(f"a message of 500 MiB to {method}: {growth[0] >> 20} MiB at the most")
        assert growth[0] < 250 << 20
        assert good(server)


@pytest.mark.parametrize("method", [*METHODS, *HEALTH_METHODS, PUBLISH])
def test_bytes_that_are_no_request(server, method: str) -> None:
    refusal = refused(send(server, method, b"\xff" * 40))
    assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
    assert refusal.reason == "REQUEST_MALFORMED"


@pytest.mark.parametrize("method", [*METHODS, *HEALTH_METHODS])
def test_a_call_without_a_request(server, method: str) -> None:
    call = server.wire.channel.stream_unary(method, **RAW)
    refusal = refused(call.future(iter([]), timeout=20))
    assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
    assert refusal.reason == "REQUEST_MISSING"


@contextmanager
def held_back(parts: Iterable = ()) -> Iterator[Iterator]:
    """The parts, and then silence until the end."""
    release = threading.Event()

    def all_parts() -> Iterator:
        yield from parts
        release.wait(60)

    try:
        yield all_parts()
    finally:
        release.set()


@pytest.mark.parametrize("method", [SCORE, "/dorad.v1.InferenceService/Generate", *HEALTH_METHODS])
def test_a_request_that_does_not_come_in_time_ends_its_call(server, method: str) -> None:
    with held_back() as nothing:
        call = server.wire.channel.stream_unary(method, **RAW).future(nothing, timeout=30)
        refusal = refused(call)
    assert refusal.code == grpc.StatusCode.UNAVAILABLE
    assert refusal.reason == "MESSAGE_TIMEOUT"


def upload(zoo, name: str, **begin: str) -> list[adapters_pb2.PublishRequest]:
    """Begin, one chunk that is all of it, and Commit."""
    folder = zoo.adapter("llama2", "dora")
    image = (folder / "adapter_model.safetensors").read_bytes()
    first = adapters_pb2.PublishBegin(
        name=name,
        adapter_config_json=(folder / "adapter_config.json").read_text(),
        safetensors_size=len(image),
        **begin,
    )
    parts = list(publish_parts(first, image))
    assert len(parts) == 3
    return parts


def test_a_stalled_upload_ends_and_can_be_resumed(server, zoo) -> None:
    parts = upload(zoo, "stalls", upload_id="stalls")
    size = parts[0].begin.safetensors_size
    with held_back(parts[:2]) as half:
        refusal = refused(server.wire.adapters.Publish.future(half, timeout=30))
    assert refusal.reason == "MESSAGE_TIMEOUT"
    wait_until(lambda: server.wire.upload("stalls").received_bytes == size, 10, "the upload")
    rest = [parts[0], parts[-1]]
    assert server.wire.adapters.Publish(iter(rest), timeout=30).adapter.version == 1


def test_a_commit_that_comes_too_late_publishes_nothing(zoo) -> None:
    parts = upload(zoo, "late")
    # The last part has come, and five seconds pass before it is looked at.
    point = {"DORAD_FAILPOINT": f"rpc_read_done:{len(parts)}=delay"}
    with serve(zoo.model("llama2"), None, {"server.message_timeout_seconds": 1}, **point) as server:
        refusal = refused(server.wire.adapters.Publish.future(iter(parts), timeout=30))
        assert refusal.reason == "MESSAGE_TIMEOUT"
        # An orderly end waits for uploads.
        assert server.stop() == 0
        assert "adapter loaded" not in server.log()
