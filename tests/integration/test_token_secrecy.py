"""No token is repeated: not by a log, an error or a printed configuration, wherever it was put."""

import hashlib
import os
import sys
from pathlib import Path

import dorad
import pytest
from lib import zygote
from lib.server import binary, run_line, serve, wait_until
from lib.tokens import write_tokens

SECRET = "dorad-7Zq9secretXw41mKpTr8uVb3nLy6"
GOOD = "a-token"
PROMPT = [11, 12, 13]
ENTRY = f"{{name: a, tenant: t, roles: [infer], sha256: {hashlib.sha256(b'x').hexdigest()}}}"
# A token where the file has no place for it.
MISPLACED = {
    "a key of the file": f"{SECRET}: 1",
    "a key of a token": f"tokens: [{{name: a, {SECRET}: x}}]",
    "a token for its digest": f"tokens: [{{name: a, tenant: t, roles: [infer], sha256: {SECRET}}}]",
    "a role": f"tokens: [{{name: a, tenant: t, roles: [{SECRET}], sha256: ab}}]",
    "a tenant": "tenants: {{u: {{}}}}\ntokens: [{}]".format(
        ENTRY.replace("tenant: t", f"tenant: {SECRET}")
    ),
    "a name, twice": "tokens: [{0}, {0}]".format(ENTRY.replace("name: a", f"name: {SECRET}")),
    "a tenant's name": f"tenants: {{{SECRET}: {{quota: 1, x: 2}}}}",
    "a bad name of a tenant": f'tenants: {{"{SECRET}!": {{}}}}',
    "a prefix": f"tenants: {{u: {{adapters: {SECRET}}}}}",
    "a quota": f"tenants: {{u: {{adapters: u., quota: {{bytes: {SECRET}}}}}}}",
    "a common name, twice": "certificates: [{0}, {0}]".format(
        f"{{name: a, tenant: t, roles: [infer], common_name: {SECRET}}}"
    ),
    "the whole file": SECRET,
    "an anchor": f"tokens: *{SECRET}",
    "a broken line": f'tokens: [{{name: a, sha256: "{SECRET}]',
}


def said_by(*words: object) -> str:
    done = run_line([str(binary()), *map(str, words)])
    return done.stdout + done.stderr


def write(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(text + "\n")
    fresh.chmod(0o600)
    fresh.rename(path)


@pytest.mark.parametrize("place", MISPLACED)
def test_a_token_in_the_wrong_place_of_the_file_is_not_repeated(tmp_path, place: str) -> None:
    tokens, config = tmp_path / "tokens.yaml", tmp_path / "dorad.yaml"
    write(tokens, MISPLACED[place])
    config.write_text(f"security: {{tokens_file: {tokens}}}\nmodel: {{path: /nowhere}}\n")
    said = said_by("check-config", config)
    assert "tokens.yaml" in said and "[TOKENS_" in said
    assert SECRET not in said
    assert SECRET not in said_by("serve", "--config", config)
    assert SECRET not in said_by("print-config", "--config", config)


@pytest.fixture(scope="module")
def tokens_file(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("secrecy") / "tokens.yaml"


@pytest.fixture(scope="module")
def server(zoo, tokens_file):
    write_tokens(tokens_file, {"a": ("t", ["infer"])}, {"t": {}})
    settings = {"security.tokens_file": tokens_file, "log.level": "debug", "log.requests": True}
    with serve(zoo.model("llama2"), settings=settings) as running:
        yield running


def failures(server) -> float:
    return server.metric("dorad_tokens_reload_failures_total")


@pytest.mark.parametrize("place", MISPLACED)
def test_a_reload_of_a_broken_file_does_not_repeat_it(server, tokens_file, place: str) -> None:
    before = failures(server)
    write(tokens_file, MISPLACED[place])
    wait_until(lambda: failures(server) > before, what="the reload")
    assert SECRET not in server.log()
    with dorad.Client(server.grpc, token=GOOD, retry_for=0) as client:
        assert client.generate(PROMPT, max_tokens=1)


def test_calls_with_good_and_bad_tokens_leave_neither_in_logs_or_errors(server) -> None:
    with dorad.Client(server.grpc, token=SECRET, retry_for=0) as client:
        with pytest.raises(dorad.DoradError) as refused:
            client.generate(PROMPT, max_tokens=1)
        assert SECRET not in repr(client)
    error = refused.value
    assert error.reason == "TOKEN_INVALID"
    assert SECRET not in f"{error} {error!r} {error.metadata} {error.__cause__!r}"
    with dorad.Client(server.grpc, token=GOOD, retry_for=0) as client:
        client.generate(PROMPT, max_tokens=1, request_id="with-the-good-token")
        assert GOOD not in repr(client)
    wait_until(lambda: "with-the-good-token" in server.log(), what="the log of the request")
    assert SECRET not in server.log() and GOOD not in server.log()
    assert SECRET not in server.metrics_text() and GOOD not in server.metrics_text()


def test_doractl_repeats_no_token_of_its_environment(server) -> None:
    doractl = (sys.executable, "-c", "import dorad.cli; dorad.cli.main()", "-t", server.grpc)
    for token, expected in ((SECRET, "TOKEN_INVALID"), (GOOD, "ROLE_MISSING")):
        for command in (("adapters", "list"), ("pause",), ("info",), ("adapters", "get", "x")):
            done = zygote.run([*doractl, *command], env=os.environ | {"DORAD_TOKEN": token})
            assert token not in done.stdout + done.stderr
        done = zygote.run([*doractl, "pause"], env=os.environ | {"DORAD_TOKEN": token})
        assert expected in done.stdout + done.stderr
