"""A model in shards of two processes is published as the same model in one process.

With gloo on the CPU, and with NCCL on two GPUs, or on one in one process.
"""

import dorad
import pytest
from dorad.train import adapter_tensors
from lib import sharding
from lib.server import serve
from lib.trl_runs import policy


@pytest.fixture
def server(zoo):
    with serve(zoo.model("llama2"), None, {"engine.kv_bytes": 16 << 20}) as running:
        yield running


def build(folder, device="cpu"):
    """With a second adapter, as TRL keeps a reference."""
    model = policy(folder, use_dora=True).to(device)
    model.add_adapter("ref", model.peft_config["default"])
    return model


def train(rank, device, file, target, folder):
    """One process of the training: publishes once for each way of sharding."""
    with sharding.group(rank, device, f"file://{file}"), dorad.Client(target, timeout=60) as client:
        for way in [sharding.replicated, *sharding.ways()]:
            model = build(folder, sharding.here())
            config = model.peft_config["default"]
            sharded = way(model)
            if way != sharding.replicated:
                with pytest.raises(ValueError, match=r"dorad\.train\.adapter_tensors"):
                    client.publish("refused", model=sharded)
            tensors = adapter_tensors(sharded, keep=rank == 0)
            if rank == 0:
                client.publish(way.__name__.replace("_", "-"), tensors=tensors, config=config)
            else:
                assert tensors == {}


@pytest.mark.parametrize("device", sharding.DEVICES)
def test_every_way_of_sharding_gives_the_adapter_of_one_process(server, zoo, tmp_path, device):
    folder = zoo.model("llama2")
    with dorad.Client(server.grpc, timeout=60) as client:
        whole = client.publish("whole", model=build(folder))
        other = client.publish("other", model=policy(folder, seed=4, use_dora=True))
        assert whole.digest != other.digest
        sharding.run(device, train, device, tmp_path / "store", server.grpc, folder)
        digests = {version.name: version.digest for version in client.adapters()}
    del digests["whole"], digests["other"]
    assert len(digests) == 1 + len(sharding.ways())
    assert set(digests.values()) == {whole.digest}
