"""The gateway's listeners: their connections, slow bodies and certificates."""

import asyncio
import socket
import ssl
import subprocess
import time

import grpc
import httpx
import pytest
import uvicorn
from dorad.gateway.listener import listen
from lib.certificates import Authority
from lib.gateway import running_gateway
from lib.gateway_clients import COMPLETION
from lib.server import wait_until


async def nothing(scope, receive, send):
    """An application that is never asked."""


async def no_delays(address, count, trust=None, **tls):
    """TCP_NODELAY of each of so many connections that a server has accepted."""
    with listen(address) as listener:
        server = uvicorn.Server(uvicorn.Config(nothing, lifespan="off", log_level="error", **tls))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        host, port = listener.getsockname()[:2]
        writers = [(await asyncio.open_connection(host, port, ssl=trust))[1] for _ in range(count)]
        try:
            async with asyncio.timeout(20):
                while len(server.server_state.connections) < count:
                    await asyncio.sleep(0.01)
            accepted = [
                connection.transport.get_extra_info("socket")
                for connection in server.server_state.connections
            ]
            clients = {writer.get_extra_info("sockname") for writer in writers}
            assert {it.getpeername() for it in accepted} == clients
            return [it.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for it in accepted]
        finally:
            for writer in writers:
                writer.close()
            server.should_exit = True
            await task


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:0"])
def test_every_accepted_connection_sends_at_once(address):
    assert all(asyncio.run(no_delays(address, 3)))


def test_every_accepted_tls_connection_sends_at_once(tmp_path):
    authority = Authority(tmp_path)
    certificate, key = authority.issue("server")
    trust = ssl.create_default_context(cafile=authority.certificate)
    files = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    assert all(asyncio.run(no_delays("127.0.0.1:0", 2, trust, **files)))


def test_a_slow_body_does_not_hold_a_place_forever(fake_gateway):
    """The limit is 30 s; here only: the connection's end is noticed while the body is read."""
    host, _, port = fake_gateway.http.rpartition(":")
    for _ in range(5):
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
            time.sleep(0.05)
    wait_until(
        lambda: (
            httpx.post(f"{fake_gateway.url}/v1/completions", json=COMPLETION).status_code == 200
        ),
        what="places are free again",
    )


def test_https_and_grpcs_with_a_certificate(fake, folder, tmp_path):
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    line = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    line += f" -keyout {key} -out {cert} -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run(line.split(), check=True, capture_output=True)
    arguments = ["--tokenizer", folder, "--tls-cert", cert, "--tls-key", key]
    arguments += ["--grpc-listen", "127.0.0.1:0"]
    with running_gateway(fake.target, *arguments, scratch=tmp_path) as running:
        port = running.http.rpartition(":")[2]
        with httpx.Client(verify=ssl.create_default_context(cafile=cert)) as client:
            answer = client.post(f"https://localhost:{port}/v1/completions", json=COMPLETION)
            assert answer.status_code == 200
        credentials = grpc.ssl_channel_credentials(cert.read_bytes())
        target = f"localhost:{running.grpc.rpartition(':')[2]}"
        with grpc.secure_channel(target, credentials) as channel:
            live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
            assert live(b"", timeout=10) == b"\x08\x01"
