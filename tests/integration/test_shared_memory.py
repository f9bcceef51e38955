"""Publishing from a trainer's memory on the same host: the same versions as from files, and nothing
of a trainer that dies, writes too early, or is somebody else."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import dorad
import dorad.aio
import grpc
import numpy as np
import pytest
from dorad._shared_memory_socket import tensor_digest
from dorad.v1 import adapters_pb2, types_pb2
from lib.server import ROOT, Server, command, device, environment, serve, wait_until
from lib.trainer import SharedMemory, Trainer, registration
from lib.wire import failure
from safetensors.torch import load_file

KIND = "dora_r64"


@pytest.fixture(scope="module")
def socket_path(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("shared_memory") / "memory.sock")


@pytest.fixture(scope="module")
def server(zoo, socket_path, tmp_path_factory):
    settings = {
        "server.shared_memory_socket": socket_path,
        "adapters.store_path": tmp_path_factory.mktemp("store") / "store",
    }
    with serve(zoo.model("slow"), None, settings) as running:
        yield running


@pytest.fixture
def client(server: Server):
    with dorad.Client(server.grpc, timeout=60) as made:
        yield made


def adapter(zoo, seed: int = 0, kind: str = KIND, family: str = "slow") -> dict:
    """tensors= and config= of an adapter on disk."""
    folder = zoo.adapter(family, kind, seed)
    return {
        "tensors": load_file(folder / "adapter_model.safetensors"),
        "config": (folder / "adapter_config.json").read_text(),
    }


def num_fds(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.pid}/fd"))


def refused(server: Server, message: adapters_pb2.PublishFromMemoryRequest):
    with pytest.raises(grpc.RpcError) as caught:
        server.wire.publish_memory(message)
    return failure(caught.value)


@pytest.mark.parametrize("kind", [KIND, "dora_bf16", "dora_everything", "lora"])
def test_is_the_version_that_the_same_files_make(server, client, zoo, socket_path, kind) -> None:
    from_file = client.publish(f"file-{kind}".replace("_", "-"), path=zoo.adapter("slow", kind))
    name = f"memory-{kind}".replace("_", "-")
    made = client.publish_from_memory(name, shared_memory=socket_path, **adapter(zoo, kind=kind))
    assert made.digest == from_file.digest
    assert (made.version, made.state, made.active) == (1, "ready", True)
    scores = client.score(
        [[1, 5, 9, 200, 7]], adapters=[from_file.ref, made.ref], chosen_token_ids=range(2048)
    )
    (whole,) = scores.chosen_logprobs
    assert np.isfinite(whole[0][1:]).all()
    assert np.array_equal(whole[0], whole[1], equal_nan=True)


def test_the_asyncio_client_publishes_from_memory(server, client, zoo, socket_path) -> None:
    async def publish():
        async with dorad.aio.Client(server.grpc, timeout=60) as made:
            with dorad.SharedTensors(socket_path) as shared:
                calls = [
                    made.publish_from_memory(
                        f"aio-{i}", shared_memory=shared, **adapter(zoo, i % 2)
                    )
                    for i in range(5)  # more than there are buffers
                ]
                return await asyncio.gather(*calls)

    digests = [version.digest for version in asyncio.run(publish())]
    assert digests == [digests[0], digests[1]] * 2 + [digests[0]] and digests[0] != digests[1]


def test_a_durable_version_from_memory_survives_a_restart(zoo, tmp_path: Path) -> None:
    settings = {
        "server.shared_memory_socket": tmp_path / "memory.sock",
        "adapters.store_path": tmp_path / "store",
    }
    with (
        dorad.SharedTensors(tmp_path / "memory.sock") as shared,
        serve(zoo.model("slow"), None, settings) as server,
        dorad.Client(server.grpc) as client,
    ):
        made = client.publish_from_memory("d", shared_memory=shared, durable=True, **adapter(zoo))
    assert not (tmp_path / "memory.sock").exists()
    with serve(zoo.model("slow"), None, settings) as server, dorad.Client(server.grpc) as client:
        assert client.adapter("d").digest == made.digest


def test_shared_tensors_follow_a_server_that_was_killed(zoo, tmp_path: Path) -> None:
    settings = {"server.shared_memory_socket": tmp_path / "memory.sock"}
    with dorad.SharedTensors(tmp_path / "memory.sock") as shared:
        with serve(zoo.model("slow"), None, settings, expect_exit=-signal.SIGKILL) as server:
            with dorad.Client(server.grpc) as client:
                first = client.publish_from_memory("a", shared_memory=shared, **adapter(zoo))
            server.process.kill()
            server.process.wait()
        # The dead server's file is still there.
        with (
            serve(zoo.model("slow"), None, settings) as server,
            dorad.Client(server.grpc) as client,
        ):
            again = client.publish_from_memory("a", shared_memory=shared, **adapter(zoo))
    assert again.digest == first.digest


# --- Memory that changes, and requests that lie ---------------------------------------------------


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
    before = server.metric("dorad_shared_memory_connections")
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
    wait_until(
        lambda: server.metric("dorad_shared_memory_connections") == before,
        what="the end of the connection",
    )
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


# --- Trainers that die ----------------------------------------------------------------------------


@contextlib.contextmanager
def victim(server: Server, socket_path: str, folder: Path, name: str, *options: str):
    """A trainer in a process of its own, with registered memory."""
    program = ROOT / "tests" / "lib" / "trainer.py"
    paths = ":".join(
        [f"{ROOT / 'client' / 'src'}", f"{ROOT / 'tests'}", os.environ.get("PYTHONPATH", "")]
    )
    process = subprocess.Popen(
        [sys.executable, program, server.grpc, socket_path, folder, name, *options],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(PYTHONPATH=paths),
    )
    try:
        assert process.stdout.readline() == "handed over\n"
        yield process
    finally:
        process.kill()
        process.wait()


def version_of(server: Server, ref: str):
    try:
        return server.wire.adapter(ref)
    except grpc.RpcError:
        return None


def test_a_trainer_killed_before_or_after_its_publish_leaves_nothing_behind(
    zoo, tmp_path: Path
) -> None:
    path, folder = tmp_path / "memory.sock", zoo.adapter("slow", KIND)
    with serve(zoo.model("slow"), None, {"server.shared_memory_socket": path}) as server:

        def nothing_held() -> bool:
            names = ("dorad_shared_memory_connections", "dorad_shared_memory_bytes")
            return all(server.metric(name) == 0 for name in names)

        def kill_two(number: int) -> None:
            with victim(server, path, folder, "before", "before") as trainer:
                assert server.metric("dorad_shared_memory_connections") == 1
                assert server.metric("dorad_shared_memory_bytes") > 0
                trainer.kill()
            assert not server.wire.list_adapters("before")
            with victim(server, path, folder, "after") as trainer:
                assert trainer.stdout.readline() == "published\n"
                trainer.kill()
            # What was answered stays.
            ready = types_pb2.ADAPTER_STATE_READY
            assert server.wire.adapter(f"after@{number}").state == ready
            server.wire.retire("after", number)
            wait_until(nothing_held, what="the memory to be given back")

        kill_two(1)  # the pool's threads have what they keep
        settled = wait_until(lambda: steady(lambda: num_fds(server)), what="steady descriptors")
        for number in range(2, 5):
            kill_two(number)
        wait_until(lambda: num_fds(server) == settled, what="the descriptors to be closed")
        wait_until(
            lambda: server.wire.info().memory_bytes["adapters"] == 0, what="the adapters' memory"
        )


def steady(count) -> int | None:
    """What count() says, if it says the same for a while."""
    seen = set()
    for _ in range(20):
        seen.add(count())
        time.sleep(0.01)
    return seen.pop() if len(seen) == 1 else None


def test_a_trainer_killed_while_its_publish_waits_publishes_nothing(
    server, client, zoo, socket_path
) -> None:
    folder = zoo.adapter("slow", KIND)
    with victim(server, socket_path, folder, "killed", "wait") as trainer:
        # The pool has one thread, and this keeps it for a while.
        loads = [
            threading.Thread(target=server.wire.publish, args=("busy", folder)) for _ in range(32)
        ]
        for load in loads:
            load.start()
        wait_until(lambda: len(server.wire.list_adapters("busy")) == len(loads))
        os.kill(trainer.pid, signal.SIGUSR1)  # Publish now.
        wait_until(lambda: version_of(server, "killed@1"), what="the publish to be under way")
        trainer.kill()
        for load in loads:
            load.join()
    state = types_pb2.ADAPTER_STATE_LOADING
    wait_until(lambda: server.wire.adapter("killed@1").state != state)
    killed = server.wire.adapter("killed@1")
    assert killed.state == types_pb2.ADAPTER_STATE_FAILED
    assert "was closed before the version was published" in killed.failure
    for version in range(1, len(loads) + 1):
        client.retire("busy", version)


def test_a_call_that_was_given_up_is_withdrawn(server, client, zoo, socket_path) -> None:
    folder = zoo.adapter("slow", KIND)
    before = {item.version for item in server.wire.list_adapters("busy")}
    with dorad.SharedTensors(socket_path) as shared:
        loads = [
            threading.Thread(target=server.wire.publish, args=("busy", folder)) for _ in range(32)
        ]
        for load in loads:
            load.start()
        wait_until(lambda: len(server.wire.list_adapters("busy")) >= len(before) + len(loads))
        with pytest.raises(dorad.DeadlineExceeded):
            client.publish_from_memory("late", shared_memory=shared, timeout=0.05, **adapter(zoo))
        # The buffer serves the next publish, which has nothing to do with the last one.
        made = client.publish_from_memory("next", shared_memory=shared, **adapter(zoo, 1))
        for load in loads:
            load.join()
    late = version_of(server, "late@1")
    assert late is None or late.state == types_pb2.ADAPTER_STATE_FAILED
    assert made.state == "ready"
    for item in server.wire.list_adapters("busy"):
        if item.version not in before:
            client.retire("busy", item.version)


# --- Under load -----------------------------------------------------------------------------------


def test_streams_stay_on_one_version_while_many_are_published(zoo, tmp_path: Path) -> None:
    path = tmp_path / "memory.sock"
    sources = [adapter(zoo, seed, "dora", "llama2") for seed in (0, 1)]
    options = dict(adapter="rl", max_tokens=12, ignore_eos=True, seed=5)
    prompts = [[10 + i, 3, 5] for i in range(4)]
    seen, stop = [], threading.Event()
    with (
        serve(zoo.model("llama2"), None, {"server.shared_memory_socket": path}) as server,
        dorad.Client(server.grpc, timeout=60) as client,
        dorad.SharedTensors(path) as shared,
    ):

        def publish(step: int) -> dorad.AdapterVersion:
            source = sources[step % 2]
            return client.publish_from_memory("rl", shared_memory=shared, keep_last=2, **source)

        contents = [publish(step).digest for step in range(2)]
        assert contents[0] != contents[1]
        alone = {
            (content, i): client.generate(prompt, **options | {"adapter": f"rl@{version}"})[0]
            for version, content in enumerate(contents, 1)
            for i, prompt in enumerate(prompts)
        }

        def sample() -> None:
            while not stop.is_set():
                for i, (one,) in enumerate(client.generate_many(prompts, **options)):
                    seen.append((i, one))

        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            published = [publish(step) for step in range(2, 10)]
        finally:
            stop.set()
            sampler.join()
    assert [version.digest for version in published] == contents * 4
    assert len({sample.spans[0].version for _, sample in seen}) > 2, "nothing ran meanwhile"
    for i, sample in seen:
        (span,) = sample.spans
        assert (span.begin, span.end) == (0, 12)
        assert span.digest == contents[(span.version - 1) % 2]
        assert np.array_equal(sample.token_ids, alone[span.digest, i].token_ids)


# --- Tensors on the GPU ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [KIND, "dora_bf16", "dora_everything", "dora_saved_embedding"])
def test_tensors_on_the_gpu_make_the_version_that_the_same_files_make(
    server, client, zoo, socket_path, kind
) -> None:
    torch = pytest.importorskip("torch")
    if device() != "cuda" or not torch.cuda.is_available():
        pytest.skip("needs a server and a torch with a CUDA GPU")
    from_file = client.publish(f"gpu-file-{kind}".replace("_", "-"), path=zoo.adapter("slow", kind))
    source = adapter(zoo, kind=kind)
    source["tensors"] = {name: tensor.cuda() for name, tensor in source["tensors"].items()}
    name = f"gpu-memory-{kind}".replace("_", "-")
    with dorad.SharedTensors(socket_path) as shared:
        made = client.publish_from_memory(name, shared_memory=shared, check=True, **source)
        assert made.digest == from_file.digest
        # The trainer's next step, in the same allocations.
        for tensor in source["tensors"].values():
            tensor.mul_(0.5)
        if kind != "dora_saved_embedding":
            following = client.publish_from_memory(name, shared_memory=shared, **source)
            assert following.digest != made.digest
        durable = client.publish_from_memory(
            name, shared_memory=shared, durable=True, **adapter(zoo, kind=kind)
        )
        assert durable.digest == made.digest
    scores = client.score(
        [[1, 5, 9, 200, 7]], adapters=[from_file.ref, made.ref], chosen_token_ids=range(2048)
    )
    (whole,) = scores.chosen_logprobs
    assert np.array_equal(whole[0], whole[1], equal_nan=True)
