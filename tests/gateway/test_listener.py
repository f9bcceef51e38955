"""The HTTP listener's connections, as uvicorn serves them."""

import asyncio
import socket
import ssl

import pytest
import uvicorn
from dorad.gateway.listener import listen
from lib.certificates import Authority


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
