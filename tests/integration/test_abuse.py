"""What a hostile caller may try: names and paths that lead elsewhere, parameters without measure,
and sockets that nobody configured."""

import os
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from dorad.v1 import adapters_pb2, control_pb2, inference_pb2
from lib.file_events import FileEvents
from lib.server import Server, serve, wait_until
from lib.tiny_models import VOCAB
from lib.wire import CHUNK, Failure, failure, generate_request, pack_ids

PROMPT = [11, 12, 13, 14, 15]
INVALID = grpc.StatusCode.INVALID_ARGUMENT
WEIGHTS = "adapter_model.safetensors"


def refused(call, *args, **kwargs) -> Failure:
    with pytest.raises(grpc.RpcError) as caught:
        call(*args, **kwargs)
    return failure(caught.value)


# --- Names and paths.


@pytest.fixture(scope="module")
def roots(zoo, tmp_path_factory) -> Path:
    """Beside `allowed`, which may be read, lies `secret`, which may not; links lead there."""
    base = tmp_path_factory.mktemp("roots").resolve()
    shutil.copytree(zoo.adapter("llama2", "lora"), base / "secret")
    allowed = base / "allowed"
    shutil.copytree(zoo.adapter("llama2", "lora"), allowed / "good")
    (allowed / "folder_link").symlink_to(base / "secret")
    (allowed / "relative_link").symlink_to("../secret")
    (allowed / "up_link").symlink_to("..")
    for kind in ("file_link", "weights_link"):
        (allowed / kind).mkdir()
    for name in ("adapter_config.json", WEIGHTS):
        (allowed / "file_link" / name).symlink_to(base / "secret" / name)
    shutil.copy(base / "secret" / "adapter_config.json", allowed / "weights_link")
    (allowed / "weights_link" / WEIGHTS).symlink_to(base / "secret" / WEIGHTS)
    return base


@pytest.fixture(scope="module")
def server(zoo, roots: Path):
    settings = {
        "adapters.allowed_roots": f"[{roots / 'allowed'}]",
        "adapters.store_path": roots / "store",
        "engine.kv_bytes": 16 << 20,
    }
    with serve(zoo.model("llama2"), {"a": zoo.adapter("llama2", "dora")}, settings) as running:
        yield running


BAD_NAMES = [
    "",
    ".",
    "..",
    "../x",
    "../../etc/passwd",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "a\0b",
    "\0",
    "a%2fb",
    "a" * 10_240,
    "ä",
    "ａ",
    "a\u202eb",
    "a\N{COMBINING ACUTE ACCENT}",
    "😀",
    "a\nb",
    "A",
    "a@",
    "@1",
    "a@-1",
]


def calls_with(server: Server, name: str, folder: Path, good: Path) -> list[Callable[[], object]]:
    wire = server.wire
    calls = [
        lambda: wire.publish(name, folder, durable=True),
        lambda: wire.publish_path(name, good, durable=True),
        lambda: wire.activate(name, 1),
        lambda: wire.retire(name, 1),
    ]
    if name:  # the base model has the empty one
        calls += [
            lambda: wire.generate(PROMPT, adapter=name, max_tokens=1),
            lambda: wire.score([PROMPT], [name]),
            lambda: wire.adapter(name),
            lambda: wire.list_adapters(name),
            lambda: wire.pause(adapter=name),
        ]
    return calls


def test_no_name_leads_to_a_file(server: Server, zoo, roots: Path) -> None:
    folder = zoo.adapter("llama2", "lora")
    store = roots / "store"
    listed = {item.name for item in server.wire.list_adapters()}
    before = sorted(store.rglob("*"))
    with FileEvents(roots, roots / "secret", store, store / "objects", store / "tmp") as events:
        for name in BAD_NAMES:
            for call in calls_with(server, name, folder, roots / "allowed" / "good"):
                refusal = refused(call)
                assert refusal.code == INVALID, (name[:20], refusal)
                assert "\n" not in refusal.message and len(refusal.message) <= 1024
        assert events.take() == set()
    assert {item.name for item in server.wire.list_adapters()} == listed
    assert sorted(store.rglob("*")) == before


BAD_PATHS = [
    "{allowed}/../secret",
    "{allowed}/good/../../secret",
    "{allowed}/folder_link",
    "{allowed}/relative_link",
    "{allowed}/up_link/secret",
    "{allowed}/file_link",
    "{allowed}/weights_link",
    "{secret}",
    "secret",
    "../secret",
    "{allowed}/good\0/../../secret",
    "{allowed}/" + "x" * 10_240,
    "{allowed}" + "/." * 5000 + "/../secret",
    "file://{secret}",
    "/proc/self/root{secret}",
    "",
    "/",
]


def test_no_path_leads_out_of_the_roots(server: Server, roots: Path) -> None:
    secret = roots / "secret"
    with FileEvents(secret) as events:
        for text in BAD_PATHS:
            path = text.format(allowed=roots / "allowed", secret=secret)
            refusal = refused(server.wire.publish_path, "p", path)
            assert refusal.code in (
                INVALID,
                grpc.StatusCode.PERMISSION_DENIED,
                grpc.StatusCode.NOT_FOUND,
            ), (text[:60], refusal)
        assert events.take() == set(), "a file outside the roots was opened"
        # The watch itself sees what is opened.
        (secret / WEIGHTS).read_bytes()
        assert events.take() == {secret / WEIGHTS}
    assert server.wire.publish_path("fine", roots / "allowed" / "good").adapter.version == 1


# --- Parameters.


def test_parameters_without_measure_are_refused_and_leave_memory_flat(server: Server) -> None:
    million = 10**6
    generates = [
        generate_request(PROMPT, max_tokens=2**31),
        generate_request(PROMPT, max_tokens=2**32 - 1, n=million),
        generate_request(PROMPT, n=million),
        generate_request(PROMPT, n=2**32 - 1),
        generate_request(PROMPT, stop=[5] * million),
        generate_request(PROMPT, logprobs=1, chosen=[5] * million),
        generate_request(PROMPT, logprobs=1, top_logprobs=2**32 - 1),
        generate_request([5] * million),
        generate_request(PROMPT, salt="s" * million),
        generate_request(PROMPT, request_id="r" * million),
        generate_request(PROMPT, adapter="a" * million),
        generate_request(PROMPT, min_tokens=2**32 - 1),
        generate_request(PROMPT, top_k=2**32 - 1, temperature=float("inf")),
    ]
    sequence = inference_pb2.TokenSequence(token_ids=pack_ids([5]))
    scores = [
        inference_pb2.ScoreRequest(sequences=[sequence] * million),
        inference_pb2.ScoreRequest(sequences=[sequence], adapters=["a"] * million),
        inference_pb2.ScoreRequest(sequences=[sequence] * 1000, adapters=["a"] * 1000),
        inference_pb2.ScoreRequest(sequences=[sequence], top_k=2**32 - 1),
        inference_pb2.ScoreRequest(sequences=[sequence], chosen_token_ids=pack_ids([5] * million)),
    ]
    others = [
        (
            server.wire.inference.Abort,
            inference_pb2.AbortRequest(
                requests=inference_pb2.RequestIds(request_ids=["r"] * million)
            ),
        ),
        (server.wire.adapters.List, adapters_pb2.ListRequest(page_size=2**32 - 1)),
        (server.wire.adapters.List, adapters_pb2.ListRequest(page_token="t" * million)),
        (
            server.wire.adapters.PublishFromPath,
            adapters_pb2.PublishFromPathRequest(
                name="p", path="/x", tags={str(i): "v" for i in range(100_000)}
            ),
        ),
        (
            server.wire.control.LimitGpuShare,
            control_pb2.LimitGpuShareRequest(limit_id="y" * million, gpu_share=0.5),
        ),
        (server.wire.control.Sleep, control_pb2.SleepRequest(tags=["kv?"] * million)),
    ]

    def generate(request: inference_pb2.GenerateRequest) -> None:
        list(server.wire.inference.Generate(request, timeout=30))

    def round_of_all() -> None:
        for request in generates:
            refusal = refused(generate, request)
            assert refusal.code == INVALID, refusal
        for request in scores:
            refusal = refused(server.wire.inference.Score, request, timeout=30)
            assert refusal.code in (INVALID, grpc.StatusCode.RESOURCE_EXHAUSTED), refusal
        for call, request in others:
            assert refused(call, request, timeout=30).code == INVALID, request.DESCRIPTOR.name

    # A message of a million parts takes 100 MB while it is refused, on whichever of gRPC's threads,
    # and the allocator keeps what fits between two others: it takes some rounds to have seen all,
    # and more where there are more processors and so more threads.
    rounds = min(40, 7 * len(os.sched_getaffinity(0)) + 1)
    for _ in range(rounds):
        round_of_all()
    before = server.rss()
    for _ in range(15):
        round_of_all()
    # One forgotten message of the smallest of these kinds would be 15 MB a round.
    assert server.rss() - before < 128 << 20
    assert server.wire.info().engine.adapter_leases == 0
    (sample,) = server.wire.generate([1, VOCAB - 1], max_tokens=1, ignore_eos=True)
    assert len(sample.tokens) == 1


def test_what_an_upload_announces_takes_no_memory(server: Server, zoo) -> None:
    """A size of many GiB, and a header that claims 2^60 bytes, before anything of it has come."""
    before = server.rss()
    config = (zoo.adapter("llama2", "lora") / "adapter_config.json").read_text()
    for _ in range(50):
        begin = adapters_pb2.PublishBegin(
            name="big", adapter_config_json=config, safetensors_size=15 << 30
        )
        parts = [
            adapters_pb2.PublishRequest(begin=begin),
            adapters_pb2.PublishRequest(
                chunk=adapters_pb2.PublishChunk(data=struct.pack("<Q", 1 << 60))
            ),
        ]
        refusal = refused(server.wire.adapters.Publish, iter(parts), timeout=30)
        assert (refusal.code, refusal.reason) == (INVALID, "PUBLISH_INCOMPLETE"), refusal
        begin.safetensors_size = CHUNK
        image = struct.pack("<Q", 1 << 60) + bytes(CHUNK - 8)
        refusal = refused(server.wire.publish_bytes, "big", config, image)
        assert refusal.code == INVALID and refusal.reason.startswith("SAFETENSORS_"), refusal
    assert server.rss() - before < 24 << 20


# --- Sockets.


def listening(pid: int) -> set[str]:
    """Addresses on which the process listens, by the kernel's tables."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(link)
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in inodes:
                address, port = local.split(":")
                words = [address[i : i + 8] for i in range(0, len(address), 8)]
                packed = b"".join(struct.pack("<I", int(word, 16)) for word in words)
                host = socket.inet_ntop(family, packed).removeprefix("::ffff:")
                found.add(f"{host}:{int(port, 16)}")
    for table in ("udp", "udp6", "raw", "raw6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            if line.split()[9] in inodes:
                found.add(f"{table} {line.split()[1]}")
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        accepts = int(words[3], 16) & 0x10000
        # The CUDA driver's own, for processes of the same user.
        is_cudas = len(words) > 7 and words[7].startswith("@cuda-")
        if accepts and words[6] in inodes and not is_cudas:
            found.add(f"unix:{words[7] if len(words) > 7 else ''}")
    return found


def test_it_listens_where_it_was_told_to_and_nowhere_else(zoo, tmp_path) -> None:
    with serve(zoo.model("llama2")) as server:
        metrics = server.metrics_url.removeprefix("http://").partition("/")[0]
        server.wire.generate(PROMPT, max_tokens=1)
        assert listening(server.pid) == {server.grpc, metrics}
    settings = {
        "server.grpc_listen": f"unix:{tmp_path}/grpc.sock",
        "server.admin_listen": f"unix:{tmp_path}/admin.sock",
        "server.shared_memory_socket": tmp_path / "shared_memory.sock",
        "server.metrics_listen": "",
    }
    with serve(zoo.model("llama2"), None, settings) as server:
        server.wire.generate(PROMPT, max_tokens=1)
        wanted = {f"unix:{tmp_path}/{name}.sock" for name in ("grpc", "admin", "shared_memory")}
        wait_until(lambda: listening(server.pid) == wanted, 5, "exactly the configured sockets")
