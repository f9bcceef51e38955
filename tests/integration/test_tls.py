"""TLS: who gets in, certificates that change while traffic runs, and what must not be served."""

import itertools
import re
import socket
import subprocess
import threading
import time
from pathlib import Path

import dorad
import grpc
import pytest
from lib.certificates import Authority, install
from lib.server import binary, command, environment, serve, wait_until

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def ca(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"), "stranger")


def tls_settings(folder: Path, ca: Authority, pair=None, **more: object) -> dict[str, object]:
    where = folder / "server.pem", folder / "server.key"
    install(pair or ca.issue("server"), where)
    return {"security.tls_cert": where[0], "security.tls_key": where[1]} | more


def works(**client: object) -> bool:
    """Whether a new connection gets an answer."""
    with dorad.Client(**client, retry_for=0, timeout=20) as it:
        try:
            it.info()
            return True
        except dorad.Unavailable:
            return False


def shown_by(address: str) -> str:
    """The subject of the certificate that a new connection gets."""
    line = ["openssl", "s_client", "-connect", address, "-alpn", "h2"]
    run = subprocess.run(line, input=b"", capture_output=True, timeout=20)
    match = re.search(r"subject=CN = (\S+)", run.stdout.decode(errors="replace"))
    return match.group(1) if match else ""


def test_serves_only_who_trusts_it_and_speaks_tls(zoo, tmp_path, ca, stranger) -> None:
    with serve(zoo.model("llama2"), settings=tls_settings(tmp_path, ca)) as server:
        assert works(target=server.grpc, ca_file=ca.certificate)
        assert not works(target=server.grpc, ca_file=stranger.certificate)
        assert not works(target=server.grpc)
        with dorad.Client(server.grpc, ca_file=ca.certificate) as client:
            samples = client.generate(PROMPT, max_tokens=4, n=2, ignore_eos=True)
            assert [len(sample.token_ids) for sample in samples] == [4, 4]
            assert client.health()
        # An old TLS is no TLS.
        line = [
            "openssl",
            "s_client",
            "-connect",
            server.grpc,
            "-tls1_1",
            "-cipher",
            "ALL:@SECLEVEL=0",
        ]
        run = subprocess.run(line, input="", capture_output=True, text=True, timeout=20)
        assert run.returncode != 0


def test_asks_clients_for_certificates_of_its_authority(zoo, tmp_path, ca, stranger) -> None:
    settings = tls_settings(tmp_path, ca) | {"security.tls_client_ca": ca.certificate}
    known, foreign = ca.issue("client"), stranger.issue("client")
    expired = ca.issue("client", begin=-3, end=-1)
    with serve(zoo.model("llama2"), settings=settings) as server:
        target = {"target": server.grpc, "ca_file": ca.certificate}
        assert works(**target, cert_file=known[0], key_file=known[1])
        assert not works(**target)
        assert not works(**target, cert_file=foreign[0], key_file=foreign[1])
        assert not works(**target, cert_file=expired[0], key_file=expired[1])


def test_a_certificate_can_stand_for_a_token(zoo, tmp_path, ca) -> None:
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(
        "certificates:\n"
        "  - {name: worker, tenant: t, common_name: worker.example, roles: [infer]}\n"
    )
    settings = tls_settings(tmp_path, ca) | {
        "security.tls_client_ca": ca.certificate,
        "security.tokens_file": tokens,
    }
    with serve(zoo.model("llama2"), settings=settings) as server:

        def client(name: str) -> dorad.Client:
            certificate, key = ca.issue(name)
            return dorad.Client(
                server.grpc, ca_file=ca.certificate, cert_file=certificate, key_file=key
            )

        with client("worker.example") as worker:
            assert worker.generate(PROMPT, max_tokens=2)
            with pytest.raises(dorad.PermissionDenied) as denied:
                worker.pause()
            assert denied.value.reason == "ROLE_MISSING"
        with client("other.example") as other, pytest.raises(dorad.PermissionDenied) as denied:
            other.info()
        assert denied.value.reason == "TOKEN_MISSING"


PAUSE = 0.02  # between calls, each of which costs both sides some milliseconds


class Traffic:
    """Calls on an old connection and on ever new ones, until it ends; all must succeed."""

    def __init__(self, target: str, ca: Authority) -> None:
        self.target, self.ca = target, ca
        self.calls = self.connections = 0
        self.failures: list[Exception] = []
        self.stop = threading.Event()
        self.threads = [threading.Thread(target=self.stay), threading.Thread(target=self.renew)]

    def once(self, client: dorad.Client) -> None:
        try:
            assert len(client.generate(PROMPT, max_tokens=3, ignore_eos=True)[0].token_ids) == 3
            self.calls += 1
        except Exception as error:
            self.failures.append(error)

    def stay(self) -> None:
        with dorad.Client(self.target, ca_file=self.ca.certificate, retry_for=0) as client:
            while not self.stop.wait(PAUSE):
                self.once(client)

    def renew(self) -> None:
        for number in itertools.count():
            if self.stop.wait(PAUSE):
                break
            # Without this, channels of one process share connections.
            options = [("grpc.use_local_subchannel_pool", 1), ("test.number", number)]
            with dorad.Client(
                self.target, ca_file=self.ca.certificate, retry_for=0, options=options
            ) as client:
                self.once(client)
            self.connections += 1

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *exc) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()


def test_a_new_certificate_is_shown_and_a_broken_one_never(zoo, tmp_path, ca) -> None:
    where = tmp_path / "server.pem", tmp_path / "server.key"
    settings = tls_settings(tmp_path, ca, ca.issue("first"))
    failures = "dorad_tls_reload_failures_total"
    expiry = "dorad_tls_certificate_expiry_timestamp_seconds"
    with (
        serve(zoo.model("llama2"), settings=settings) as server,
        Traffic(server.grpc, ca) as traffic,
    ):
        assert shown_by(server.grpc) == "first"
        first = server.metric(expiry)
        assert time.time() + 86400 < first < time.time() + 3 * 86400
        install(ca.issue("second", end=5), where)
        wait_until(lambda: shown_by(server.grpc) == "second", 60, "the new certificate")
        wait_until(lambda: server.metric(expiry) > first + 86400, what="the new expiry")
        assert server.metric(failures) == 0

        broken = ["not a certificate", where[0].read_text()[:200], ca.issue("third")[0].read_text()]
        for number, text in enumerate(broken, start=1):
            where[0].write_text(text)
            wait_until(lambda n=number: server.metric(failures) == n, 60, "the failure")
            assert shown_by(server.grpc) == "second"
        install(ca.issue("late", begin=-3, end=-1), where)
        wait_until(lambda: server.metric(failures) == 4, 60, "the failure")
        assert "TLS_CERTIFICATE_EXPIRED" in server.log()
        where[0].unlink()
        wait_until(lambda: server.metric(failures) == 5, 60, "the failure")
        assert shown_by(server.grpc) == "second"
        install(ca.issue("fourth"), where)
        wait_until(lambda: shown_by(server.grpc) == "fourth", 60, "the good one")
        assert server.metric(failures) == 5
        seen = traffic.calls, traffic.connections
        wait_until(lambda: traffic.connections > seen[1] + 2, 60, "more connections")
    assert not traffic.failures, traffic.failures[:3]


def test_socket_files_stay_plain(zoo, tmp_path, ca) -> None:
    path = f"unix:{tmp_path}/admin.sock"
    settings = tls_settings(tmp_path, ca) | {"server.admin_listen": path}
    with (
        serve(zoo.model("llama2"), settings=settings) as server,
        dorad.Client(server.grpc, admin_target=path, ca_file=ca.certificate) as client,
    ):
        assert client.info().device
        assert client.generate(PROMPT, max_tokens=2)


def refusal(*arguments: str, **changes: str) -> str:
    """What the program says when it does not start."""
    run = subprocess.run(
        list(arguments), capture_output=True, text=True, timeout=60, env=environment(**changes)
    )
    assert run.returncode == 78, (run.returncode, run.stdout, run.stderr)
    assert "dorad ready" not in run.stdout
    return run.stderr


def test_does_not_start_where_others_could_listen_in_or_come_in(zoo, tmp_path, ca) -> None:
    model = zoo.model("llama2")
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text("tokens: []\n")
    open_to_all = {"server.grpc_listen": "0.0.0.0:0"}
    said = refusal(*command(model, settings=open_to_all))
    assert "security.tls_cert" in said and "security.tokens_file" in said
    said = refusal(*command(model, settings=open_to_all | {"security.tokens_file": tokens}))
    assert "security.tls_cert" in said and "anyone could" not in said
    said = refusal(*command(model, settings=open_to_all | tls_settings(tmp_path, ca)))
    assert "anyone could publish" in said
    said = refusal(*command(model, settings={"server.admin_listen": "[::]:0"}))
    assert "server.admin_listen" in said
    config = tmp_path / "config.yaml"
    config.write_text('server:\n  grpc_listen: "0.0.0.0:50051"\n')
    assert "allow_insecure" in refusal(str(binary()), "check-config", str(config))


# A resolver in which localhost is another host.
ELSEWHERE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <string.h>

int getaddrinfo(const char* host, const char* service, const struct addrinfo* hints,
                struct addrinfo** found) {
  int (*real)(const char*, const char*, const struct addrinfo*, struct addrinfo**) =
      dlsym(RTLD_NEXT, "getaddrinfo");
  if (host != NULL && strcmp(host, "localhost") == 0) host = "192.0.2.7";
  return real(host, service, hints, found);
}
"""


def test_localhost_that_resolves_elsewhere_is_open_to_others(zoo, tmp_path) -> None:
    source, library = tmp_path / "elsewhere.c", tmp_path / "elsewhere.so"
    source.write_text(ELSEWHERE)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    line = command(zoo.model("llama2"), settings={"server.grpc_listen": "localhost:0"})
    said = refusal(*line, LD_PRELOAD=str(library))
    assert "security.tls_cert" in said and "anyone could publish" in said
    with serve(zoo.model("llama2"), settings={"server.grpc_listen": "localhost:0"}) as server:
        assert server.wire.info().device


def test_can_be_told_to_start_all_the_same(zoo) -> None:
    # The name of this host is no loopback address to the rule, and is one to the kernel.
    settings = {"server.grpc_listen": f"{socket.gethostname()}:0", "security.allow_insecure": True}
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        pytest.skip("this host's name has no address")
    with serve(zoo.model("llama2"), settings=settings) as server:
        assert server.wire.info().device
        assert "security.allow_insecure" in server.log()


@pytest.mark.parametrize("what", ["expired", "key", "missing", "half"])
def test_does_not_start_with_bad_tls_files(zoo, tmp_path, ca, what: str) -> None:
    settings = tls_settings(tmp_path, ca)
    expected = {"expired": "expired on", "key": "the key does not match", "missing": "no such file"}
    if what == "expired":
        settings = tls_settings(tmp_path, ca, ca.issue("late", begin=-3, end=-1))
    elif what == "key":
        settings["security.tls_key"] = ca.issue("other")[1]
    elif what == "missing":
        settings["security.tls_cert"] = tmp_path / "nothing"
    else:
        del settings["security.tls_key"]
    said = refusal(*command(zoo.model("llama2"), settings=settings))
    assert expected.get(what, "a certificate needs its key") in said


def test_a_client_that_never_shakes_hands_is_dropped(zoo, tmp_path, ca) -> None:
    with serve(zoo.model("llama2"), settings=tls_settings(tmp_path, ca)) as server:
        host, _, port = server.grpc.rpartition(":")
        idle = [socket.create_connection((host, int(port)), timeout=30) for _ in range(20)]
        assert works(target=server.grpc, ca_file=ca.certificate)
        for connection in idle:
            assert connection.recv(1) == b""
            connection.close()


def test_grpc_itself_sees_a_broken_handshake_as_unavailable(zoo, tmp_path, ca, stranger) -> None:
    with serve(zoo.model("llama2"), settings=tls_settings(tmp_path, ca)) as server:
        credentials = grpc.ssl_channel_credentials(stranger.certificate.read_bytes())
        with (
            dorad.Client(server.grpc, credentials=credentials, retry_for=0) as client,
            pytest.raises(dorad.Unavailable),
        ):
            client.info(timeout=10)
