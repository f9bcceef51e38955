"""A server that takes adapters from a trainer's memory."""

import dorad
import pytest
from lib.server import Server, serve


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
