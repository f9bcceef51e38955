"""Publishing from a trainer's memory on the same host makes the same versions as from files."""

import asyncio
import signal
import threading
from pathlib import Path

import dorad
import dorad.aio
import numpy as np
import pytest
from lib.server import device, serve
from lib.shared_memory import KIND, adapter


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
