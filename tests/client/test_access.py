"""How the client shows who it is, and where it refuses to."""

import asyncio
import hashlib
import json
import socket

import dorad
import grpc
import pytest
from dorad._access import Access
from dorad.cli.app import app
from typer.testing import CliRunner

ENVIRONMENT = ("DORAD_TOKEN", "DORAD_CA_FILE", "DORAD_CERT_FILE", "DORAD_KEY_FILE")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


def access(**given) -> Access:
    names = ("token", "ca_file", "cert_file", "key_file", "credentials")
    return Access.of(*(given.get(name) for name in names))


def authorization(server) -> list[str]:
    """What each Generate brought."""
    return [call["authorization"] for call in server.metadata]


def test_a_token_goes_with_every_call(server) -> None:
    with dorad.Client(server.target, token="secret") as client:
        client.generate([1], max_tokens=1)
    assert authorization(server) == ["Bearer secret"]


def test_the_environment_gives_what_arguments_do_not(server, monkeypatch) -> None:
    monkeypatch.setenv("DORAD_TOKEN", "from-environment")
    with dorad.Client(server.target) as client:
        client.generate([1], max_tokens=1)
    assert authorization(server) == ["Bearer from-environment"]

    async def generate() -> None:
        async with dorad.aio.Client(server.target, token="argument") as client:
            await client.generate([1], max_tokens=1)

    asyncio.run(generate())
    assert authorization(server)[-1] == "Bearer argument"


@pytest.mark.parametrize(
    "target",
    [
        "127.0.0.1:1",
        "localhost:1",
        "[::1]:1",
        "127.1.2.3:1",
        "unix:/run/x.sock",
        "unix:///run/x.sock",
        "dns:///localhost:1",
        "dns:localhost:1",
        "dns:/localhost",
        "ipv4:127.0.0.1:1",
        "ipv4:///127.0.0.1:1",
        "ipv4:127.0.0.1:1,127.0.0.2:1",
        "ipv6:[::1]:1",
        "ipv6:[::1]:1,[::1]:2",
        "[::1]",
        "::1",
        "localhost",
    ],
)
def test_plain_text_to_this_host_may_carry_a_token(target) -> None:
    assert access(token="t").channel_credentials(target) is None


@pytest.mark.parametrize(
    "target",
    [
        "10.0.0.1:1",
        "gpu1:1",
        "gpu1",
        "[fe80::1]:1",
        "dns:///gpu1:1",
        "ipv4:10.0.0.1:1",
        "ipv4:127.0.0.1:1,10.0.0.1:1",
        "ipv4:127.0.0.1:1,",
        "ipv6:[::1]:1,[2001:db8::5]:1",
        "ipv6:[::1],[2001:db8::5]:1",
        "ipv6:::1%2C2001:db8::5",
        "[::1]:1,[2001:db8::5]:1",
        "[::1].example.org:1",
        "[::1]10.0.0.1:1",
        "[::1",
        "dns://10.0.0.53/localhost:1",
        "dns://10.0.0.53:53/127.0.0.1:1",
        "dns:localhost:1,gpu1:1",
        "dns:///gpu1/localhost:1",
        "DNS://10.0.0.53/localhost:1",
        "127.0.0.1.example.org:1",
        "localhost.example.org:1",
        "xds:///service",
    ],
)
def test_a_token_is_never_sent_to_another_host_in_plain_text(target, monkeypatch) -> None:
    with pytest.raises(ValueError, match="plain text"):
        access(token="t").channel_credentials(target)
    with pytest.raises(ValueError, match="plain text"):
        dorad.Client(target, token="t")
    with pytest.raises(ValueError, match="plain text"):
        dorad.Client(admin_target=target, token="t")
    monkeypatch.setenv("DORAD_TOKEN", "t")
    with pytest.raises(ValueError, match="plain text"):
        dorad.Client(target)
    # With TLS it is.
    credentials = grpc.ssl_channel_credentials()
    assert access(token="t", credentials=credentials).channel_credentials(target) is credentials


@pytest.fixture
def proxy(monkeypatch):
    """A listening socket that every variable of the environment names as the proxy."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        for name in ("no_grpc_proxy", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        for name in ("grpc_proxy", "https_proxy", "http_proxy"):
            monkeypatch.setenv(name, f"http://{address}")
        monkeypatch.setenv("GRPC_ADDRESS_HTTP_PROXY", address)
        monkeypatch.setenv("GRPC_ADDRESS_HTTP_PROXY_ENABLED_ADDRESSES", "127.0.0.1")
        yield listener


INSISTING = [
    ("grpc.enable_http_proxy", 1),
    ("grpc.address_http_proxy_enabled_addresses", "127.0.0.1"),
]


@pytest.mark.parametrize("options", [(), INSISTING])
def test_no_proxy_of_the_environment_sees_what_is_sent_in_plain_text(server, proxy, options):
    given = {"token": "secret", "timeout": 5, "options": options, "retry_for": 0}
    with dorad.Client(server.target, admin_target=server.target, **given) as client:
        client.generate([1], max_tokens=1)
        client.info()

    async def generate() -> None:
        async with dorad.aio.Client(server.target, admin_target=server.target, **given) as client:
            await client.generate([1], max_tokens=1)
            await client.info()

    asyncio.run(generate())
    assert authorization(server) == ["Bearer secret"] * 2
    with pytest.raises(BlockingIOError):
        proxy.accept()


def test_tls_goes_through_the_environments_proxy_unread(server, proxy) -> None:
    credentials = grpc.ssl_channel_credentials()
    given = {"token": "secret", "credentials": credentials, "timeout": 2, "retry_for": 0}
    with dorad.Client(server.target, **given) as client, pytest.raises(dorad.DoradError):
        client.info()
    connection, _ = proxy.accept()
    with connection:
        asked = connection.recv(4096)
    assert asked.startswith(b"CONNECT ") and b"secret" not in asked


def test_a_token_is_not_shown() -> None:
    assert "secret" not in repr(access(token="secret"))


@pytest.mark.parametrize("token", ["with space", "line\nbreak", "umläut"])
def test_refuses_a_token_that_no_header_carries(token) -> None:
    with pytest.raises(ValueError, match="token") as refused:
        access(token=token)
    assert token not in str(refused.value)


def test_refuses_what_does_not_go_together(tmp_path) -> None:
    file = tmp_path / "f.pem"
    file.write_text("x")
    with pytest.raises(ValueError, match="together"):
        access(cert_file=file)
    with pytest.raises(ValueError, match="either"):
        access(ca_file=file, credentials=grpc.ssl_channel_credentials())
    with pytest.raises(FileNotFoundError):
        access(ca_file=tmp_path / "nothing")
    with pytest.raises(ValueError, match="connect"):
        dorad.RolloutPool(["127.0.0.1:1"], connect=dorad.aio.Client, token="t")


def test_a_pool_shows_its_token_to_every_server(server) -> None:
    with dorad.RolloutPool([server.target], token="secret") as pool:
        pool.generate_many([[1], [2]], max_tokens=1)
    assert authorization(server) == ["Bearer secret"] * 2


def test_doractl_makes_a_token_and_its_entry() -> None:
    arguments = ["token", "w1", "--tenant", "t", "-r", "publish", "--adapters", "t.", "-o", "json"]
    made = [json.loads(CliRunner().invoke(app, arguments).stdout) for _ in range(2)]
    assert made[0]["token"] != made[1]["token"] and len(made[0]["token"]) > 40
    entry = made[0]["entry"]
    assert entry.pop("sha256") == hashlib.sha256(made[0]["token"].encode()).hexdigest()
    assert entry == {"name": "w1", "tenant": "t", "roles": ["publish"], "adapters": "t."}
    text = CliRunner().invoke(app, ["token", "w1"]).stdout
    token = text.split("DORAD_TOKEN=")[1].split()[0]
    assert hashlib.sha256(token.encode()).hexdigest() in text
    assert '"roles": ["infer"]' in text
