"""A model in shards of two processes (gloo) is published as the same model in one process."""

import dorad
import pytest
import torch.multiprocessing as mp
from dorad.train import adapter_tensors
from lib import sharding
from lib.server import serve
from lib.trl_runs import policy


@pytest.fixture(scope="module")
def server(zoo):
    with serve(zoo.model("llama2"), None, {"engine.kv_bytes": 16 << 20}) as running:
        yield running


def train(rank, file, target, folder):
    """One process of the training: publishes once for each way of sharding."""
    with sharding.group(rank, f"file://{file}"):
        for way in sharding.ways():
            model = policy(folder, use_dora=True)
            config = model.peft_config["default"]
            tensors = adapter_tensors(way(model), keep=rank == 0)
            if rank == 0:
                with dorad.Client(target, timeout=60) as client:
                    client.publish(way.__name__.replace("_", "-"), tensors=tensors, config=config)


def test_every_way_of_sharding_gives_the_adapter_of_one_process(server, zoo, tmp_path):
    folder = zoo.model("llama2")
    with dorad.Client(server.grpc, timeout=60) as client:
        whole = client.publish("whole", model=policy(folder, use_dora=True))
        other = client.publish("other", model=policy(folder, seed=4, use_dora=True))
        assert whole.digest != other.digest
        mp.spawn(train, args=(tmp_path / "store", server.grpc, folder), nprocs=sharding.WORLD)
        digests = {version.name: version.digest for version in client.adapters()}
    del digests["whole"], digests["other"]
    assert len(digests) == len(sharding.ways())
    assert set(digests.values()) == {whole.digest}
