"""Offers the fake server, a client of it and an adapter to every test of the client."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import dorad
import numpy as np
from fake_server import FakeServer, image_of


@pytest.fixture
def server():
    with FakeServer() as fake:
        yield fake


@pytest.fixture
def client(server):
    with dorad.Client(server.target, timeout=20) as it:
        yield it


@pytest.fixture
def folder(tmp_path):
    """An adapter that is sent in three chunks."""
    path = tmp_path / "adapter"
    path.mkdir()
    (path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    image = image_of({"x.lora_A.weight": np.arange(700_000).reshape(7, 100_000)})
    (path / "adapter_model.safetensors").write_bytes(image)
    return path
