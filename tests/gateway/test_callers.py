"""Who may ask the gateway for what."""

import asyncio
import json
import ssl

import dorad
import grpc
import httpx
import pytest
from dorad.gateway import admission
from dorad.gateway.callers import caller_of
from fake_server import FakeServer
from lib.certificates import Authority
from lib.gateway import ended_gateway, running_gateway
from lib.server import free_port, serve, wait_until
from lib.tokens import write_tokens
from tritonclient.grpc import service_pb2, service_pb2_grpc

COMPLETION = {"prompt": [5, 6], "max_tokens": 1}


GUARDED = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{base}"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v2/models/{base}"),
    ("GET", "/v2/models/{base}/ready"),
    ("GET", "/v2/models/{base}/config"),
    ("GET", "/v2/models/{base}/stats"),
    ("GET", "/v2/models/stats"),
    ("POST", "/v2/models/{base}/infer"),
    ("POST", "/v2/models/{base}/generate"),
    ("POST", "/v2/models/{base}/generate_stream"),
    ("POST", "/v2/repository/index"),
]
PUBLIC = [
    "/health",
    "/metrics",
    "/openapi.json",
    "/version",
    "/v2",
    "/v2/health/live",
    "/v2/health/ready",
]
GUARDED_CALLS = (
    "ModelReady",
    "ModelMetadata",
    "ModelConfig",
    "ModelStatistics",
    "RepositoryIndex",
    "ModelInfer",
    "ModelStreamInfer",
)


def bearers(*values):
    return [("authorization", value) for value in values]


def code_of(target, method, metadata, base):
    """How a call of the Open Inference Protocol ends."""
    requests = {
        "ModelReady": service_pb2.ModelReadyRequest(name=base),
        "ModelMetadata": service_pb2.ModelMetadataRequest(name=base),
        "ModelConfig": service_pb2.ModelConfigRequest(name=base),
        "ModelStatistics": service_pb2.ModelStatisticsRequest(name=base),
        "RepositoryIndex": service_pb2.RepositoryIndexRequest(),
        "ModelInfer": service_pb2.ModelInferRequest(model_name=base),
        "ModelStreamInfer": iter([service_pb2.ModelInferRequest(model_name=base)]),
        "ServerLive": service_pb2.ServerLiveRequest(),
        "ServerReady": service_pb2.ServerReadyRequest(),
        "ServerMetadata": service_pb2.ServerMetadataRequest(),
    }
    with grpc.insecure_channel(target) as channel:
        call = getattr(service_pb2_grpc.GRPCInferenceServiceStub(channel), method)
        try:
            answer = call(requests[method], timeout=20, metadata=metadata)
            if method == "ModelStreamInfer":
                list(answer)
        except grpc.RpcError as error:
            return error.code().name
    return "OK"


# --- Authorization that could be anybody's --------------------------------------------------------

AMBIGUOUS = [
    bearers("Bearer one", "Bearer two"),
    bearers("Bearer one", "Bearer one"),
    bearers("Bearer one", "Basic dTpw"),
    bearers("Basic dTpw"),
    bearers("Bearer"),
    bearers("Bearer one two"),
    bearers("Bearer one, Bearer two"),
    bearers("one"),
]


@pytest.mark.parametrize("headers", AMBIGUOUS)
def test_several_or_malformed_authorizations_are_401_over_http(http, base, headers):
    body = {"model": base, **COMPLETION}
    answer = http.post("/v1/completions", json=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "TOKEN_INVALID")
    assert answer.headers["www-authenticate"] == "Bearer"
    answer = http.get(f"/v2/models/{base}", headers=headers)
    assert answer.status_code == 401 and answer.json()["error"].startswith("TOKEN_INVALID: ")
    assert http.get("/health", headers=headers).status_code == 200


@pytest.mark.parametrize("metadata", AMBIGUOUS)
def test_several_or_malformed_authorizations_are_unauthenticated_over_grpc(gateway, base, metadata):
    for method in ("ModelMetadata", "ModelStreamInfer"):
        assert code_of(gateway.grpc, method, metadata, base) == "UNAUTHENTICATED"
    assert code_of(gateway.grpc, "ServerReady", metadata, base) == "OK"


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_scheme_of_a_token_may_be_written_as_one_likes(gateway, http, base, scheme):
    headers = bearers(f"{scheme} one")
    assert http.get(f"/v1/models/{base}", headers=headers).status_code == 200
    assert code_of(gateway.grpc, "ModelMetadata", headers, base) == "OK"


# --- A server that asks its callers ---------------------------------------------------------------

TOKENS = {
    "own": ("ops", ["infer"]),
    "worker": ("t", ["infer"]),
    "trainer": ("t", ["publish"]),
    "boss": ("ops", ["admin"]),
}


@pytest.fixture(scope="module")
def tokens_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "tokens.yaml"
    write_tokens(path, TOKENS, {})
    return path


@pytest.fixture(scope="module")
def asking(folder, tokens_file):
    with serve(folder, settings={"security.tokens_file": tokens_file}) as running:
        yield running


@pytest.fixture(scope="module")
def asking_gateway(asking, folder, tmp_path_factory):
    arguments = ["--tokenizer", folder, "--grpc-listen", "127.0.0.1:0"]
    scratch = tmp_path_factory.mktemp("gateway")
    with running_gateway(
        asking.grpc, *arguments, scratch=scratch, DORAD_TOKEN="own-token"
    ) as running:
        # So that it knows the model's facts.
        url = f"{running.url}/v1/models"
        assert httpx.get(url, headers=bearers("Bearer worker-token")).status_code == 200
        yield running


@pytest.fixture
def asking_http(asking_gateway):
    with httpx.Client(base_url=asking_gateway.url, timeout=30) as it:
        yield it


@pytest.mark.parametrize(
    ("headers", "code"),
    [([], "TOKEN_MISSING"), (bearers("Bearer nobodys-token"), "TOKEN_INVALID")],
)
def test_nothing_is_answered_or_read_for_a_caller_whom_the_server_does_not_know(
    asking_gateway, asking_http, base, headers, code
):
    for method, path in GUARDED:
        # No JSON: 401 rather than 400 says that nobody has looked.
        answer = asking_http.request(method, path.format(base=base), content="{", headers=headers)
        assert answer.status_code == 401 and base not in answer.text, (path, answer.text)
        error = answer.json()["error"]
        said = error.partition(":")[0] if path.startswith("/v2") else error["code"]
        assert said == code, path
    for method in GUARDED_CALLS:
        assert code_of(asking_gateway.grpc, method, headers, base) == "UNAUTHENTICATED", method


def test_health_and_the_gateways_own_routes_stay_open(asking_gateway, asking_http):
    for path in PUBLIC:
        assert asking_http.get(path).status_code == 200, path
    for method in ("ServerLive", "ServerReady", "ServerMetadata"):
        assert code_of(asking_gateway.grpc, method, (), "") == "OK"


@pytest.mark.parametrize("name", ["worker", "trainer", "boss"])
def test_every_role_learns_what_the_model_is(asking_gateway, asking_http, base, name):
    headers = bearers(f"Bearer {name}-token")
    for path in (f"/v1/models/{base}", "/v1/models", f"/v2/models/{base}/ready"):
        assert asking_http.get(path, headers=headers).status_code == 200, path
    assert code_of(asking_gateway.grpc, "ModelMetadata", headers, base) == "OK"
    answer = asking_http.post(
        "/v1/completions", json={"model": base, **COMPLETION}, headers=headers
    )
    assert answer.status_code == (403 if name == "trainer" else 200)


def test_a_token_that_is_taken_out_stops_working(asking_http, tokens_file, base):
    def status() -> int:
        headers = bearers("Bearer leaving-token")
        return asking_http.get(f"/v1/models/{base}", headers=headers).status_code

    write_tokens(tokens_file, TOKENS | {"leaving": ("t", ["infer"])}, {})
    wait_until(lambda: status() == 200, 20, "the token is known")
    write_tokens(tokens_file, TOKENS, {})
    wait_until(lambda: status() == 401, 20, "the token is forgotten")


def test_a_server_that_asks_nobody_is_not_asked_for_each_caller(folder, tmp_path):
    with (
        FakeServer() as fake,
        running_gateway(fake.target, "--tokenizer", folder, scratch=tmp_path) as running,
        httpx.Client(base_url=running.url, timeout=30) as http,
    ):
        for i in range(20):
            headers = bearers(f"Bearer {i}")
            assert http.get("/v1/models/fake-model", headers=headers).status_code == 200
        asked = [method for method, _ in fake.routing.seen].count("GetInfo")
    # For the model's facts, and with nobody's token; again should the 20 take long.
    assert asked <= 6


class Servers:
    """In place of the gateway's servers: knows the callers in `known`, and counts questions."""

    def __init__(self, known):
        self.known = known
        self.asked = []
        self.failure = None

    def of(self, metadata):
        class Asked:
            async def info(_, timeout):
                self.asked.append(dict(metadata).get("authorization", ""))
                await asyncio.sleep(0.01)
                if self.failure is not None:
                    raise self.failure
                if self.asked[-1] not in self.known:
                    raise dorad.PermissionDenied("no", code="UNAUTHENTICATED")

            async def accepted_by_any(asked):
                try:
                    await asked.info(timeout=5)
                except dorad.PermissionDenied as error:
                    return error

        return Asked()


def admitted(door, *values):
    """Whether a caller with these authorizations is let in."""

    async def ask():
        try:
            await door.admit(caller_of(bearers(*values)))
        except dorad.PermissionDenied:
            return False
        return True

    return ask()


def test_many_requests_of_one_caller_are_one_question():
    async def run():
        own = Servers({"Bearer a"})
        door = admission.Admission(own)
        assert all(await asyncio.gather(*(admitted(door, "Bearer a") for _ in range(100))))
        assert not any(await asyncio.gather(*(admitted(door, "Bearer b") for _ in range(100))))
        assert own.asked == ["", "Bearer a", "Bearer b"]

    asyncio.run(run())


def test_answers_are_forgotten_after_a_while(monkeypatch):
    monkeypatch.setattr(admission, "_SECONDS", 0.05)

    async def run():
        own = Servers({"Bearer a"})
        door = admission.Admission(own)
        assert await admitted(door, "Bearer a") and not await admitted(door)
        own.known = {""}
        await asyncio.sleep(0.06)
        assert await admitted(door)
        own.known = set()
        await asyncio.sleep(0.06)
        assert not await admitted(door, "Bearer a")

    asyncio.run(run())


def test_a_server_that_cannot_say_lets_nobody_in_and_is_asked_again():
    async def run():
        own = Servers({"Bearer a"})
        own.failure = dorad.Unavailable("gone", code="UNAVAILABLE")
        door = admission.Admission(own)
        for _ in range(2):
            with pytest.raises(dorad.Unavailable):
                await admitted(door, "Bearer a")
        own.failure = None
        assert await admitted(door, "Bearer a")

    asyncio.run(run())


def test_a_caller_who_gives_up_does_not_end_the_question_of_others():
    async def run():
        door = admission.Admission(Servers({"Bearer a"}))
        first = asyncio.create_task(admitted(door, "Bearer a"))
        second = asyncio.create_task(admitted(door, "Bearer a"))
        await asyncio.sleep(0.005)
        first.cancel()
        assert await second

    asyncio.run(run())


def test_what_is_remembered_is_bounded_and_holds_no_token(monkeypatch):
    monkeypatch.setattr(admission, "_REMEMBERED", 8)

    async def run():
        door = admission.Admission(Servers({"Bearer secret"}))
        assert await admitted(door, "Bearer secret")
        assert "secret" not in repr([vars(door), vars(door._said)])
        for i in range(50):
            assert not await admitted(door, f"Bearer {i}")
        assert len(door._said._known) == 8

    asyncio.run(run())


# --- A gateway that others can reach --------------------------------------------------------------

# The loopback, written as the rule does not know it.
ELSEWHERE = "127.1:0"


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def https(authority):
    certificate, key = authority.issue("gateway")
    return ["--tls-cert", certificate, "--tls-key", key]


def refused_start(target, *arguments, **env):
    """What the gateway says instead of starting."""
    run = ended_gateway(target, *arguments, **env)
    assert (run.returncode, run.stdout) == (64, ""), run
    return run.stderr


@pytest.mark.parametrize("listener", ["--listen", "--grpc-listen"])
def test_others_are_not_let_in_to_a_server_that_asks_nobody(server, https, listener):
    said = refused_start(server.grpc, listener, ELSEWHERE, *https)
    assert "without a token" in said and "--allow-insecure" in said


@pytest.mark.parametrize("own", [{}, {"DORAD_TOKEN": "own-token"}])
def test_others_are_let_in_to_a_server_that_asks(asking, https, authority, base, tmp_path, own):
    with running_gateway(
        asking.grpc, "--listen", ELSEWHERE, *https, scratch=tmp_path, **own
    ) as running:
        trust = ssl.create_default_context(cafile=authority.certificate)
        url = f"https://{running.http}/v1/models/{base}"
        assert httpx.get(url, verify=trust).status_code == 401
        answer = httpx.get(url, verify=trust, headers=bearers("Bearer worker-token"))
        # Without a token of its own the gateway does not learn the model's facts.
        assert answer.status_code == (200 if own else 401)


def test_allow_insecure_lets_others_in(server, base, tmp_path):
    arguments = ["--listen", ELSEWHERE, "--allow-insecure"]
    with running_gateway(server.grpc, *arguments, scratch=tmp_path) as running:
        assert httpx.get(f"{running.url}/v1/models/{base}").status_code == 200


def test_a_server_that_turns_out_to_ask_nobody_gets_no_calls_of_others(
    folder, https, authority, tmp_path
):
    address = f"127.0.0.1:{free_port()}"
    with running_gateway(
        address, "--tokenizer", folder, "--listen", ELSEWHERE, *https, scratch=tmp_path
    ) as running:
        trust = ssl.create_default_context(cafile=authority.certificate)
        with httpx.Client(base_url=f"https://{running.http}", verify=trust, timeout=30) as http:

            def code() -> str:
                return http.post("/v1/completions", json=COMPLETION).json()["error"]["code"]

            assert code() == "UNAVAILABLE"
            with serve(folder, settings={"server.grpc_listen": address}):
                wait_until(lambda: http.get("/health").status_code == 200, 20, "health")
                assert code() == "SERVER_OPEN"


@pytest.mark.parametrize("listed", [False, True])
def test_others_do_not_get_the_rights_of_the_gateways_certificate(
    folder, https, authority, tmp_path, listed
):
    certificate, key = authority.issue("dorad")
    settings = {
        "security.tls_cert": certificate,
        "security.tls_key": key,
        "security.tls_client_ca": authority.certificate,
    }
    if listed:
        entry = {"name": "g", "tenant": "ops", "roles": ["infer"], "common_name": "client"}
        settings["security.tokens_file"] = tmp_path / "tokens.yaml"
        settings["security.tokens_file"].write_text(json.dumps({"certificates": [entry]}))
    own, own_key = authority.issue("client")
    files = {"CA": authority.certificate, "CERT": own, "KEY": own_key}
    env = {f"DORAD_{name}_FILE": str(path) for name, path in files.items()}
    with serve(folder, settings=settings) as server:
        said = refused_start(server.grpc, "--listen", ELSEWHERE, *https, **env)
    assert "certificate" in said and "--allow-insecure" in said
