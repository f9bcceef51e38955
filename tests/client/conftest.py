"""Offers the fake server to every test of the client."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import dorad
from fake_server import FakeServer


@pytest.fixture
def server():
    with FakeServer() as fake:
        yield fake


@pytest.fixture
def client(server):
    with dorad.Client(server.target, timeout=20) as it:
        yield it
