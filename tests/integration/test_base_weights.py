"""One copy of the base model: a trainer on the same host leases the server's weights."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import dorad
import dorad.train
import grpc
import pytest
import torch
from dorad.v1 import control_pb2
from lib import zygote
from lib.base_weights import greedy, in_files, same
from lib.server import Server, device, environment, serve, wait_until
from lib.wire import failure

# Matrices are served as the checkpoint has them: bf16 on every device.
FAMILY = "llama3"


@pytest.fixture(scope="module")
def socket_path(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("shared_memory") / "memory.sock")


@pytest.fixture(scope="module")
def server(zoo, socket_path):
    settings = {"server.shared_memory_socket": socket_path, "engine.kv_bytes": 16 << 20}
    with serve(zoo.model(FAMILY), None, settings) as running:
        yield running


@pytest.fixture
def client(server: Server):
    with dorad.Client(server.grpc, timeout=60) as made:
        yield made
    wait_until(lambda: leased_bytes(server) == 0, what="the end of the test's lease")


def leased_bytes(server: Server) -> float:
    gc.collect()
    return server.metric("dorad_shared_weight_bytes")


@pytest.mark.parametrize("family", ["llama3", "qwen2_window", "qwen25_tied", "qwen3_tied"])
def test_every_tensor_is_that_of_the_files_bit_for_bit(zoo, tmp_path, family) -> None:
    settings = {"server.shared_memory_socket": tmp_path / "memory.sock"}
    with serve(zoo.model(family), None, settings) as server, dorad.Client(server.grpc) as client:
        weights = dorad.train.base_weights(client, verify=True)
        files = in_files(zoo.model(family))
        assert set(weights) == set(files)
        assert all(same(weights[name], files[name]) for name in files)
        assert weights.device.type == device()
        assert weights.digest == client.info().model.digest
        # Norms and biases, which are served in fp32, are copies; matrices are not.
        vectors = sum(tensor.nbytes for tensor in files.values() if tensor.ndim == 1)
        assert weights.copied_bytes == vectors
        assert weights.shared_bytes == sum(t.nbytes for t in files.values()) - vectors
        assert client.info().shared_weight_bytes >= weights.shared_bytes


@pytest.mark.skipif(device() == "cuda", reason="a GPU computes in bf16")
@pytest.mark.parametrize("family", ["llama_bias", "llama_yarn", "llama_dynamic", "mistral"])
def test_on_the_cpu_wider_checkpoints_keep_their_values(zoo, tmp_path, family) -> None:
    settings = {"server.shared_memory_socket": tmp_path / "memory.sock"}
    with serve(zoo.model(family), None, settings) as server, dorad.Client(server.grpc) as client:
        weights = dorad.train.base_weights(client, verify=True)
        files = in_files(zoo.model(family))
        assert set(weights) == set(files)
        for name, tensor in files.items():
            matrix = tensor.ndim == 2
            assert same(weights[name], tensor.float() if matrix else tensor), name


def test_tensors_that_are_served_in_another_form_are_left_to_the_trainer(zoo, tmp_path) -> None:
    settings = {"server.shared_memory_socket": tmp_path / "memory.sock"}
    with serve(zoo.model("gemma3"), None, settings) as server, dorad.Client(server.grpc) as client:
        weights = dorad.train.base_weights(client, verify=True)
    files = in_files(zoo.model("gemma3"))
    served = {name for name in files if name.startswith("language_model.")}
    others = {name for name in served if name.endswith("norm.weight")}  # with their one
    assert len(others) == 4 * 6 + 1
    if device() == "cpu":  # with the tower
        served = set(files)
        others |= {name for name in files if name.startswith("multi_modal_projector.")}
        assert len(others) == 4 * 6 + 1 + 2
    assert set(weights) == served - others
    for name in weights:  # the table of positions is held in fp32
        wide = name.endswith("position_embedding.weight")
        assert same(weights[name], files[name].float() if wide else files[name]), name


def test_rounded_weights_are_those_that_are_served_and_cannot_be_verified(zoo, tmp_path) -> None:
    settings = {
        "server.shared_memory_socket": tmp_path / "memory.sock",
        "model.compute_dtype": "bf16",
    }
    with serve(zoo.model("llama2"), None, settings) as server, dorad.Client(server.grpc) as client:
        weights = dorad.train.base_weights(client)
        for name, tensor in in_files(zoo.model("llama2")).items():
            assert same(weights[name], tensor.bfloat16() if tensor.ndim == 2 else tensor), name
        with pytest.raises(dorad.train.BaseWeightsError, match=r"rounded it to torch\.bfloat16"):
            dorad.train.base_weights(client, verify=True)


def test_digests_are_compared(client, monkeypatch) -> None:
    digest = client.info().model.digest
    assert dorad.train.base_weights(client, expected_digest=digest).digest == digest
    with pytest.raises(dorad.train.BaseWeightsError, match="not 1234"):
        dorad.train.base_weights(client, expected_digest="1234")

    def tamper(change) -> None:
        real = client._control.ShareBaseWeights

        def answer(*arguments, **options):
            message = real(*arguments, **options)
            change(message)
            return message

        monkeypatch.setattr(client._control, "ShareBaseWeights", answer)
        with pytest.raises(dorad.train.BaseWeightsError) as caught:
            dorad.train.base_weights(client, verify=True)
        monkeypatch.setattr(client._control, "ShareBaseWeights", real)
        return caught.value.problems

    (problem,) = tamper(lambda message: setattr(message, "digest", "0" * 64))
    assert problem.endswith("0" * 64)
    name = "model.layers.1.mlp.up_proj.weight"

    def of(message):
        return next(tensor for tensor in message.tensors if tensor.name == name)

    # Another place, as when the two sides mean different files.
    (problem,) = tamper(lambda message: setattr(of(message), "offset", of(message).offset + 64))
    assert problem.startswith(f"{name}: ")
    (problem,) = tamper(lambda message: setattr(of(message), "sha256", bytes(32)))
    assert problem.startswith(f"{name}: ")


# --- One copy -------------------------------------------------------------------------------------


def shared_inodes(pid: int) -> dict[int, int]:
    """Resident bytes of the process by inode of the weights' memory files."""
    found: dict[int, int] = {}
    inode = 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):
            inode = int(fields[4]) if "memfd:dorad-weights" in line else 0
        elif inode and fields[0] == "Rss:":
            found[inode] = found.get(inode, 0) + int(fields[1]) * 1024
    return found


@pytest.mark.skipif(device() == "cuda", reason="of the host's memory")
def test_server_and_trainer_map_the_same_memory(server, client) -> None:
    weights = dorad.train.base_weights(client)
    total = sum(float(tensor.double().sum()) for tensor in weights.values())
    assert total == total, "all of it has been read"
    (mine,) = shared_inodes(os.getpid()).items()
    (theirs,) = shared_inodes(server.pid).items()
    assert mine[0] == theirs[0]
    assert mine[1] >= weights.shared_bytes
    held = weights.shared_bytes + 2 * weights.copied_bytes  # fp32 for bf16
    assert theirs[1] < held + held // 10, "the server has another copy"


@pytest.mark.skipif(device() != "cuda", reason="of a GPU's memory")
def test_a_lease_takes_no_memory_of_the_gpu(zoo, tmp_path) -> None:
    settings = {"server.shared_memory_socket": tmp_path / "memory.sock"}
    with serve(zoo.model("slow"), None, settings) as server, dorad.Client(server.grpc) as client:
        first = dorad.train.base_weights(client)  # And whatever the libraries take once.
        before = torch.cuda.mem_get_info()[0]
        second = dorad.train.base_weights(client)
        taken = before - torch.cuda.mem_get_info()[0]
        assert second.shared_bytes > 8 << 20
        assert taken < second.shared_bytes // 4
        places = [tensor.data_ptr() for tensor in (*first.values(), *second.values())]
        assert len(set(places)) == len(places)


# --- A trainer in a process of its own ------------------------------------------------------------

PRELUDE = """
import sys, time
import torch
import dorad, dorad.train
client = dorad.Client(sys.argv[1])
weights = dorad.train.base_weights(client)
name = "model.layers.0.self_attn.q_proj.weight"
print("leased", flush=True)
"""


@contextlib.contextmanager
def leaseholder(server: Server, program: str):
    """The process, and what it writes to stderr."""
    with tempfile.TemporaryFile("w+") as stderr:
        process = zygote.Program(
            [sys.executable, "-c", PRELUDE + program, server.grpc],
            imports=zygote.TRAINING,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment(),
        )
        try:
            leased = process.stdout.readline()
            stderr.seek(0)
            assert leased == "leased\n", stderr.read()
            yield process, stderr
        finally:
            process.kill()
            process.wait(60)
            process.stdin.close()
            process.stdout.close()


def test_a_trainer_cannot_write(server, client) -> None:
    before = greedy(server)
    program = "weights[name].fill_(0)\nif weights.device.type == 'cuda': torch.cuda.synchronize()\n"
    with leaseholder(server, program + "print('written')") as (trainer, stderr):
        code = trainer.wait(120)
        assert "written" not in trainer.stdout.read()
        stderr.seek(0)
        if device() == "cuda":
            assert code != 0 and "CUDA error" in stderr.read()
        else:
            assert code == -signal.SIGSEGV
    assert greedy(server) == before


@pytest.mark.parametrize("end", ["kill", "exit", "forget"])
def test_the_lease_ends_with_the_trainer_or_its_last_tensor(server, client, end) -> None:
    program = """
import gc
kept = weights[name]
del weights
gc.collect()
client.close()
if sys.stdin.readline() == "forget\\n":
    del kept
    gc.collect()
    time.sleep(600)
"""
    fds = len(os.listdir(f"/proc/{server.pid}/fd"))
    with leaseholder(server, program) as (trainer, _):
        assert leased_bytes(server) > 0
        if end == "kill":
            trainer.kill()
        else:
            trainer.stdin.write(f"{end}\n")
            trainer.stdin.flush()
        wait_until(lambda: leased_bytes(server) == 0, what="the end of the lease")
    wait_until(lambda: len(os.listdir(f"/proc/{server.pid}/fd")) <= fds, what="closed descriptors")


def test_one_tensor_keeps_the_lease(server, client) -> None:
    first, second = dorad.train.base_weights(client), dorad.train.base_weights(client)
    held = leased_bytes(server)
    assert held >= first.shared_bytes, "one memory for any number of leases"
    name = "model.embed_tokens.weight"
    rows = first[name][5:7]
    copy = rows.clone()
    del first
    assert leased_bytes(server) == held
    del second
    assert leased_bytes(server) == held
    assert torch.equal(rows, copy)
    del rows
    wait_until(lambda: leased_bytes(server) == 0, what="the end of the lease")


def test_leased_weights_outlive_the_server(zoo, tmp_path) -> None:
    settings = {"server.shared_memory_socket": tmp_path / "memory.sock"}
    with (
        serve(zoo.model(FAMILY), None, settings, expect_exit=-signal.SIGKILL) as server,
        dorad.Client(server.grpc) as client,
    ):
        weights = dorad.train.base_weights(client)
        server.process.kill()
        server.process.wait()
    files = in_files(zoo.model(FAMILY))
    assert all(same(weights[name], files[name]) for name in files)


# --- Refusals -------------------------------------------------------------------------------------


def test_without_a_shared_memory_socket_nothing_is_lent(zoo) -> None:
    with serve(zoo.model(FAMILY)) as server, dorad.Client(server.grpc) as client:
        assert client.info().shared_memory_socket == ""
        with pytest.raises(dorad.Conflict) as caught:
            dorad.train.base_weights(client)
        assert caught.value.reason == "SHARED_MEMORY_NOT_CONFIGURED"
        with pytest.raises(grpc.RpcError) as refused:
            server.wire.control.ShareBaseWeights(control_pb2.ShareBaseWeightsRequest())
        assert failure(refused.value).reason == "SHARED_MEMORY_NOT_CONFIGURED"


def test_only_the_session_token_of_an_open_connection_is_good(server) -> None:
    for session_token in (b"", bytes(16), b"x" * 17):
        with pytest.raises(grpc.RpcError) as caught:
            server.wire.control.ShareBaseWeights(
                control_pb2.ShareBaseWeightsRequest(session_token=session_token)
            )
        assert failure(caught.value).reason == "SHARED_MEMORY_SESSION_UNKNOWN"


def test_a_socket_that_is_elsewhere_is_named(server, client, socket_path, tmp_path) -> None:
    with pytest.raises(dorad.Unavailable, match="no shared-memory socket at"):
        dorad.train.base_weights(client, shared_memory=tmp_path / "none.sock")
    there = tmp_path / "there.sock"
    there.symlink_to(socket_path)
    assert dorad.train.base_weights(client, shared_memory=there)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to become somebody else")
def test_another_user_is_refused(zoo) -> None:
    with tempfile.TemporaryDirectory(prefix="dorad-test-") as folder:
        path = Path(folder) / "memory.sock"
        program = f"""
import os, socket, struct
os.setuid(65534)
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.connect({str(path)!r})
s.send(b"DORADGET" + bytes(8))
answer, fds, _, _ = socket.recv_fds(s, 512, 4)
print(struct.unpack_from("<I", answer)[0], answer[24:].decode().split()[0], len(fds))
"""
        with serve(zoo.model(FAMILY), None, {"server.shared_memory_socket": path}):
            # Where the files let others through, the kernel tells who connects.
            os.chmod(folder, 0o755)
            os.chmod(path, 0o666)
            run = subprocess.run(
                [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
            )
    assert run.stdout.split() == ["7", "SHARED_MEMORY_PEER_REFUSED", "0"], run.stderr


# --- Sleep ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("host_weights", [True, False])
def test_lent_weights_sleep_without_being_given_back(zoo, tmp_path, host_weights) -> None:
    settings = {
        "server.shared_memory_socket": tmp_path / "memory.sock",
        "engine.kv_bytes": 16 << 20,
        "memory.host_weights": host_weights,
    }
    with serve(zoo.model(FAMILY), None, settings) as server, dorad.Client(server.grpc) as client:
        before, held = greedy(server), server.wire.info().memory_bytes["weights"]
        files = in_files(zoo.model(FAMILY))
        weights = dorad.train.base_weights(client)
        freed = client.sleep()
        assert freed["weights"] == 0 and freed["kv"] > 0
        assert client.info().shared_weight_bytes >= weights.shared_bytes
        assert server.wire.info().memory_bytes["weights"] == held
        assert all(same(weights[name], files[name]) for name in files), "the trainer's turn"
        client.wake()
        assert greedy(server) == before

        client.sleep()
        if device() == "cuda":
            with pytest.raises(dorad.Unavailable) as caught:
                dorad.train.base_weights(client)
            assert caught.value.reason == "SERVER_SLEEPING"
        del weights
        wait_until(lambda: leased_bytes(server) == 0, what="the end of the lease")
        if device() == "cuda":
            wait_until(
                lambda: server.wire.info().memory_bytes.get("weights", 0) == 0,
                what="the release of the weights' memory",
            )
        client.wake()
        assert greedy(server) == before
        assert all(same(t, files[n]) for n, t in dorad.train.base_weights(client).items())
