"""Makes the client importable from the checkout and offers the fake server to every test."""

import pathlib
import sys

import pytest

CLIENT = pathlib.Path(__file__).resolve().parents[2] / "client"
sys.path[:0] = [str(CLIENT), str(CLIENT / "src"), str(pathlib.Path(__file__).parent)]

import generate_stubs  # noqa: E402

if not generate_stubs.is_fresh(CLIENT / "src"):
    generate_stubs.generate(CLIENT / "src")

import dorad  # noqa: E402
from fake_server import FakeServer  # noqa: E402


@pytest.fixture
def server():
    with FakeServer() as fake:
        yield fake


@pytest.fixture
def client(server):
    with dorad.Client(server.target, timeout=20) as it:
        yield it
