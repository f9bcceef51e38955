"""Servers that take an adapter's version from each other: tokens, tenants and certificates."""

import contextlib

import grpc
import pytest
from dorad.v1 import adapters_pb2_grpc
from lib.certificates import Authority
from lib.peers import ALLOWED, FakePeer, Files
from lib.server import serve
from lib.tokens import write_tokens
from lib.wire import failure, publish_parts

SMALL = {"engine.kv_bytes": 16 << 20, "engine.threads": 1} | ALLOWED


@pytest.fixture(scope="module")
def files(zoo):
    return Files.read(zoo.adapter("slow", "dora"))


def test_peers_present_their_token_and_need_the_role(zoo, files, tmp_path):
    tokens = tmp_path / "tokens.yaml"
    callers = {
        "peer": ("t", ["publish"]),
        "reader": ("t", ["infer"]),
        "other": ("u", ["publish"]),
    }
    write_tokens(tokens, callers, {"t": {}, "u": {"adapters": "u."}})
    secret = tmp_path / "secret"
    settings = SMALL | {"security.tokens_file": tokens, "peers.token_file": secret}
    metadata = [("authorization", "Bearer peer-token")]
    with contextlib.ExitStack() as stack:
        secret.write_text("reader-token\n")
        secret.chmod(0o600)
        first, second = (
            stack.enter_context(
                serve(
                    zoo.model("slow"),
                    settings=settings | {"adapters.store_path": tmp_path / f"store-{n}"},
                )
            )
            for n in range(2)
        )
        parts = publish_parts(files.begin("a", durable=True), files.image)
        first.wire.adapters.Publish(parts, metadata=metadata, timeout=60)

        def publish():
            request = files.request("a", first.grpc)
            return second.wire.adapters.PublishFromPeer(request, metadata=metadata, timeout=120)

        with pytest.raises(grpc.RpcError) as caught:
            publish()
        assert failure(caught.value).reason == "PEER_UNAVAILABLE"
        assert "reader has no role for FetchAdapter" in failure(caught.value).message
        # The file is read for each transfer.
        secret.write_text("peer-token\n")
        assert publish().adapter.version == 1
        with FakePeer(files) as peer:
            request = files.request("b", peer.target)
            second.wire.adapters.PublishFromPeer(request, metadata=metadata, timeout=120)
            assert peer.tokens == ["Bearer peer-token"]
        others = [("authorization", "Bearer other-token")]
        with pytest.raises(grpc.RpcError) as caught:
            list(first.wire.adapters.FetchAdapter(files.wanted("a"), metadata=others, timeout=60))
        assert failure(caught.value).reason == "ADAPTER_NOT_ALLOWED"


def test_peers_use_tls_with_the_servers_own_certificate(zoo, files, tmp_path):
    authority = Authority(tmp_path)
    certificate, key = authority.issue("server")
    settings = SMALL | {
        "security.tls_cert": certificate,
        "security.tls_key": key,
        "security.tls_client_ca": authority.certificate,
        "peers.ca_file": authority.certificate,
        "adapters.store_path": tmp_path / "store",
    }
    credentials = grpc.ssl_channel_credentials(
        authority.certificate.read_bytes(), key.read_bytes(), certificate.read_bytes()
    )
    with contextlib.ExitStack() as stack:
        stubs = []
        for n in range(2):
            own = settings | {"adapters.store_path": tmp_path / f"store-{n}"}
            server = stack.enter_context(serve(zoo.model("slow"), settings=own))
            channel = stack.enter_context(grpc.secure_channel(server.grpc, credentials))
            stubs.append((server, adapters_pb2_grpc.AdapterServiceStub(channel)))
        (first, to_first), (_, to_second) = stubs
        begin = files.begin("a", durable=True)
        to_first.Publish(publish_parts(begin, files.image), timeout=60)
        for host in ("127.0.0.1", "localhost"):
            port = first.grpc.rpartition(":")[2]
            name = "a" if host == "127.0.0.1" else "b"
            if name == "b":
                to_first.Publish(publish_parts(files.begin("b", durable=True), files.image))
            request = files.request(name, f"{host}:{port}")
            assert to_second.PublishFromPeer(request, timeout=60).adapter.version == 1
