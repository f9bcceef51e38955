"""Where the gateway finds the server's services, and when it does not start."""

import socket

import httpx
import pytest
from dorad.gateway.listener import listen
from fake_server import FakeServer
from lib.gateway import ended_gateway, running_gateway
from lib.server import free_port, serve


def refusal(target, *arguments):
    """What the gateway says instead of starting."""
    run = ended_gateway(target, *arguments)
    assert (run.returncode, run.stdout) == (64, ""), run
    return run.stderr


@pytest.mark.parametrize("by", ["option", "environment"])
def test_adapters_and_control_may_have_a_listener_of_their_own(zoo, folder, tmp_path, by):
    admin = f"unix:{tmp_path / 'admin.sock'}"
    arguments = ["--tokenizer", folder, *(["--admin-target", admin] if by == "option" else [])]
    env = {"DORAD_ADMIN_TARGET": admin} if by == "environment" else {}
    adapters = {"dora": zoo.adapter("llama2", "dora")}
    with (
        serve(folder, adapters, {"server.admin_listen": admin}) as server,
        running_gateway(server.grpc, *arguments, scratch=tmp_path, **env) as running,
        httpx.Client(base_url=running.url, timeout=30) as http,
    ):
        models = [model["id"] for model in http.get("/v1/models").json()["data"]]
        assert "dora" in models and len(models) == 2
        body = {"model": "dora", "prompt": "x", "max_tokens": 2}
        assert http.post("/v1/completions", json=body).status_code == 200
        assert http.get("/v2/models/dora").status_code == 200
        assert http.get("/health").status_code == 200


def test_a_target_without_control_is_refused_at_the_start():
    with FakeServer(admin_listener=True) as split:
        said = refusal(split.target)
    assert split.target in said and "UNIMPLEMENTED" in said and "--admin-target" in said


def test_a_proxy_that_denies_control_is_refused_at_the_start():
    with FakeServer() as fake:
        fake.deny_info = "the proxy does not offer this call on this port"
        said = refusal(fake.target)
    assert "PERMISSION_DENIED" in said and "does not offer this call" in said


def test_an_admin_target_in_plain_text_elsewhere_is_refused():
    assert "192.0.2.1:1 is reached in plain text" in refusal(
        "127.0.0.1:1", "--admin-target", "192.0.2.1:1"
    )


def test_a_server_that_is_not_there_yet_is_waited_for(folder, tmp_path):
    target = f"127.0.0.1:{free_port()}"
    with running_gateway(target, "--tokenizer", folder, scratch=tmp_path) as running:
        assert httpx.get(f"{running.url}/health").status_code == 503


def test_a_taken_port_is_told_as_that():
    with FakeServer() as fake:
        run = ended_gateway(fake.target, "--grpc-listen", fake.target)
    told = run.stderr.splitlines()[-1]  # Behind what gRPC itself has to say.
    assert run.returncode == 1 and told.startswith("doractl: "), run.stderr
    assert fake.target in told and "Traceback" not in run.stderr


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:0"])
def test_answers_do_not_wait_for_the_clients_acknowledgement(address):
    with (
        listen(address) as listener,
        socket.create_connection(listener.getsockname()[:2]),
    ):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--listen", "0.0.0.0:0"],
        ["--listen", "nowhere"],
        ["--tls-cert", "a.pem"],
        ["--tokenizer", "/nonexistent"],
    ],
)
def test_a_bad_command_line_is_a_usage_error(arguments):
    run = ended_gateway("127.0.0.1:1", *arguments)
    assert run.returncode == 64 and run.stderr.startswith("doractl: "), run.stderr
