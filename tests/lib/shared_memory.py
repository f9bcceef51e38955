"""Adapters to publish from a trainer's memory, and refusals of such calls."""

import grpc
import pytest
from dorad.v1 import adapters_pb2
from safetensors.torch import load_file

from lib.server import Server
from lib.wire import failure

KIND = "dora_r64"


def adapter(zoo, seed: int = 0, kind: str = KIND, family: str = "slow") -> dict:
    """tensors= and config= of an adapter on disk."""
    folder = zoo.adapter(family, kind, seed)
    return {
        "tensors": load_file(folder / "adapter_model.safetensors"),
        "config": (folder / "adapter_config.json").read_text(),
    }


def refused(server: Server, message: adapters_pb2.PublishFromMemoryRequest):
    with pytest.raises(grpc.RpcError) as caught:
        server.wire.publish_memory(message)
    return failure(caught.value)
