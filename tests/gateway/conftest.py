"""The gateway in front of the real server, with two adapters, and in front of the fake server."""

import sys
from pathlib import Path

import dorad
import httpx
import openai
import pytest
from dorad.text import ModelText
from lib.gateway import running_gateway
from lib.server import serve

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "client"))

from fake_server import FakeServer

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="session")
def folder(zoo):
    return zoo.model_with_tokenizer("llama2")


@pytest.fixture(scope="session")
def text(folder):
    return ModelText(folder)


@pytest.fixture(scope="session")
def server(zoo, folder):
    adapters = {name: zoo.adapter("llama2", name) for name in ("dora", "lora")}
    with serve(folder, adapters) as running:
        yield running


@pytest.fixture(scope="session")
def gateway(server, folder, tmp_path_factory):
    scratch = tmp_path_factory.mktemp("gateway")
    arguments = ["--tokenizer", folder, "--grpc-listen", "127.0.0.1:0"]
    with running_gateway(server.grpc, *arguments, scratch=scratch) as running:
        yield running


@pytest.fixture(scope="session")
def ids_only(server, tmp_path_factory):
    """A gateway without a tokenizer."""
    scratch = tmp_path_factory.mktemp("ids-only")
    with (
        running_gateway(server.grpc, scratch=scratch) as running,
        httpx.Client(base_url=running.url, timeout=30) as it,
    ):
        yield it


@pytest.fixture(scope="session")
def grpc_client(server):
    with dorad.Client(server.grpc, timeout=30) as it:
        yield it


@pytest.fixture(scope="session")
def base(grpc_client):
    return grpc_client.info().model.name


@pytest.fixture
def client(gateway):
    with openai.OpenAI(
        base_url=f"{gateway.url}/v1", api_key="any", max_retries=0, timeout=30
    ) as it:
        yield it


@pytest.fixture
def http(gateway):
    with httpx.Client(base_url=gateway.url, timeout=30) as it:
        yield it


@pytest.fixture
def fake():
    with FakeServer() as server:
        yield server


@pytest.fixture
def fake_gateway(fake, folder, tmp_path):
    with running_gateway(
        fake.target, "--tokenizer", folder, "--max-requests", 3, "--drain", 5, scratch=tmp_path
    ) as running:
        yield running


@pytest.fixture
def fake_http(fake_gateway):
    with httpx.Client(base_url=fake_gateway.url, timeout=20) as it:
        yield it


# --- With --rl


@pytest.fixture(scope="session")
def adapter_root(zoo, tmp_path_factory):
    """Below it: dora-0, dora-1, lora-0."""
    kinds = (("dora", 0), ("dora", 1), ("lora", 0))
    return zoo.copy_adapters("slow", kinds, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="session")
def slow_folder(zoo):
    return zoo.model_with_tokenizer("slow")


@pytest.fixture(scope="session")
def rl_server(slow_folder):
    with serve(slow_folder) as running:
        yield running


@pytest.fixture(scope="session")
def rl_gateway(rl_server, slow_folder, adapter_root, tmp_path_factory):
    arguments = ["--rl", "--adapter-root", adapter_root, "--tokenizer", slow_folder]
    scratch = tmp_path_factory.mktemp("rl")
    with running_gateway(rl_server.grpc, *arguments, scratch=scratch) as running:
        yield running


@pytest.fixture
def rl(rl_gateway, rl_client):
    """Awake and running afterwards."""
    with httpx.Client(base_url=rl_gateway.url, timeout=60) as it:
        yield it
    rl_client.wake()
    rl_client.resume()


@pytest.fixture(scope="session")
def rl_client(rl_server):
    with dorad.Client(rl_server.grpc, timeout=60) as it:
        yield it
