"""doractl context, and what a command takes from a context."""

import json
import os
import stat

import pytest
from dorad.cli import contexts
from dorad.cli.app import app
from dorad.cli.load import app as load_app
from fake_server import FakeServer
from lib.certificates import Authority
from typer.testing import CliRunner


def run(*words, program=app, name="doractl", **environment):
    words = [str(word) for word in words]
    return CliRunner().invoke(program, words, prog_name=name, env=environment)


def good(*words, **environment):
    result = run(*words, **environment)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def wrong(*words, **environment):
    result = run(*words, **environment)
    assert result.exit_code == 64, (result.output, result.exception)
    assert result.stderr.startswith("doractl: ")
    return result.stderr


@pytest.fixture
def two():
    """Servers that can be told apart by their generation."""
    with FakeServer() as one, FakeServer() as other:
        one.generation, other.generation = 1, 2
        yield one, other


def reached(*words, **environment):
    return json.loads(good("info", "-o", "json", *words, **environment))["generation"]


def test_contexts_are_made_listed_chosen_changed_and_deleted(tmp_path):
    assert "no contexts in" in run("context", "list").stderr
    good("context", "set", "prod", "-t", "gpu1:50051", "--token-env", "PROD_TOKEN", "--use")
    good("context", "set", "dev", "-t", "unix:/run/dorad.sock")
    rows = [line.split() for line in good("context", "list").splitlines()[1:]]
    assert rows == [
        ["dev", "unix:/run/dorad.sock"],
        ["*", "prod", "gpu1:50051", "variable", "PROD_TOKEN"],
    ]
    assert json.loads(good("context", "show", "-o", "json")) == {
        "name": "prod",
        "current": True,
        "target": "gpu1:50051",
        "token_env": "PROD_TOKEN",
    }
    good("context", "use", "dev")
    good("context", "set", "dev", "--token-file", "token", "--admin-target", "gpu2:50052")
    assert f"file {os.getcwd()}/token" in good("context", "list")
    good("context", "set", "dev", "--token-file", "")
    shown = json.loads(good("context", "show", "-o", "json"))
    assert shown["admin_target"] == "gpu2:50052" and "token_file" not in shown
    good("context", "delete", "dev")
    assert "no current context" in wrong("context", "show")
    assert "dev" not in good("context", "list")


def test_the_file_is_the_users_alone():
    good("context", "set", "prod", "-t", "gpu1:50051")
    assert stat.S_IMODE(contexts.path().stat().st_mode) == 0o600
    assert [entry.name for entry in contexts.path().parent.iterdir()] == ["contexts.yaml"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["context", "set", "new"], "--target"),
        (["context", "set", "a b", "-t", "h:1"], "'a b' is not a name"),
        (["context", "set", "new", "-t", "gpu1"], 'give "gpu1:50051"'),
        (["context", "set", "new", "-t", "http://gpu1:1"], 'give "gpu1:1"'),
        (["context", "set", "new", "-t", "h:1", "--cert-file", "c"], "key_file must be given"),
        (["context", "set", "prod", "--token-env", "A", "--token-file", "b"], "not both"),
        (["context", "set", "prod", "--metrics", "gpu1:9464"], "not an http URL"),
        (["context", "use", "prd"], "there is no context 'prd'; did you mean 'prod'?"),
        (["context", "show", "nothing"], "there is no context 'nothing'"),
        (["context", "delete", "prd"], "did you mean 'prod'?"),
        (["--context", "prd", "info"], "did you mean 'prod'?"),
        (["info", "--context", "prod", "-t", "h:1"], "give --target or --context, not both"),
        (["-t", "h:1", "info", "--context", "prod"], "give --target or --context, not both"),
    ],
)
def test_mistakes_are_told_in_a_line_and_change_nothing(words, told):
    good("context", "set", "prod", "-t", "gpu1:50051")
    before = contexts.path().read_text()
    assert told in wrong(*words)
    assert contexts.path().read_text() == before


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[", "while parsing"),
        ("- a", "expected a mapping"),
        ("context: {}", "there is no key 'context'; did you mean 'contexts'?"),
        ("contexts: {a: {targt: 'h:1'}}", "'targt'; did you mean 'target'?"),
        ("contexts: {a: {target: 50051}}", "target is not text"),
        ("contexts: {a: {target: gpu1}}", "context 'a': the target 'gpu1' has no port"),
        ("contexts: {a: h}", "context 'a' is not a mapping"),
        ("current: a", "there is no context 'a'"),
    ],
)
def test_a_broken_file_is_told_with_its_path(text, told):
    contexts.path().parent.mkdir(parents=True)
    contexts.path().write_text(text)
    said = wrong("info")
    assert told in said and str(contexts.path()) in said
    assert len(said.splitlines()) == 1


def test_the_current_context_names_the_server(two):
    one, other = two
    good("context", "set", "one", "-t", one.target, "--use")
    good("context", "set", "other", "-t", other.target)
    assert reached() == 1
    assert reached("--context", "other") == 2
    assert reached(DORAD_CONTEXT="other") == 2
    good("context", "use", "other")
    assert reached() == 2
    good("context", "use")
    assert run("info", "-t", one.target).exit_code == 0


def test_options_count_more_than_the_environment_and_that_more_than_the_current_context(two):
    one, other = two
    good("context", "set", "one", "-t", one.target, "--use")
    good("context", "set", "other", "-t", other.target)
    assert reached("-t", other.target) == 2
    assert reached(DORAD_TARGET=other.target) == 2
    assert reached(DORAD_TARGET=other.target, DORAD_CONTEXT="one") == 2
    assert reached("--context", "one", DORAD_TARGET=other.target) == 1
    assert reached("-t", one.target, DORAD_CONTEXT="other") == 1
    assert reached("--context", "one", DORAD_CONTEXT="other") == 1
    before = run("--context", "other", "info", "-o", "json", DORAD_TARGET=one.target)
    assert json.loads(before.stdout)["generation"] == 2


def test_a_context_knows_the_admin_listener():
    with FakeServer(admin_listener=True) as split:
        good("context", "set", "it", "-t", split.target, "--admin-target", split.admin_target)
        assert good("info", "--context", "it")
        good("context", "set", "plain", "-t", split.target)
        # The environment's address is another server's.
        wanted = run("info", "--context", "plain", DORAD_ADMIN_TARGET=split.admin_target)
        assert wanted.exit_code == 1 and "UNIMPLEMENTED" in wanted.stderr


def tokens(server):
    return [dict(metadata).get("authorization") for metadata in server.metadata]


def generated(server, *words, **environment):
    """The token that the server was sent."""
    server.metadata.clear()
    good("generate", "--token-ids", "1", "--max-tokens", "1", *words, **environment)
    return tokens(server)[-1]


def test_a_token_is_named_and_read_when_it_is_needed(two, tmp_path):
    one = two[0]
    (tmp_path / "token").write_text("of-the-file\n")
    good("context", "set", "file", "-t", one.target, "--token-file", tmp_path / "token", "--use")
    good("context", "set", "env", "-t", one.target, "--token-env", "MINE")
    good("context", "set", "none", "-t", one.target)
    assert generated(one) == "Bearer of-the-file"
    assert generated(one, "--context", "env", MINE="of-mine") == "Bearer of-mine"
    assert "of-the-file" not in contexts.path().read_text() + good("context", "show", "file")
    assert generated(one, DORAD_TOKEN="outer") == "Bearer outer"
    assert generated(one, "--context", "file", DORAD_TOKEN="outer") == "Bearer of-the-file"
    assert generated(one, "--context", "none", DORAD_TOKEN="outer") == "Bearer outer"


def test_a_token_of_a_context_is_not_sent_to_another_server(two, tmp_path):
    one, other = two
    (tmp_path / "token").write_text("secret")
    good("context", "set", "it", "-t", one.target, "--token-file", tmp_path / "token", "--use")
    assert generated(other, "-t", other.target) is None
    assert generated(other, DORAD_TARGET=other.target) is None


def test_a_token_that_is_not_there_is_told(tmp_path):
    good("context", "set", "it", "-t", "127.0.0.1:1", "--token-env", "MINE", "--use")
    assert "the token of context 'it': the variable MINE" in wrong("info")
    good("context", "set", "it", "--token-env", "", "--token-file", tmp_path / "none")
    said = wrong("info")
    assert "the token of context 'it'" in said and str(tmp_path / "none") in said


def test_a_context_has_tls_of_its_own(tmp_path, monkeypatch):
    authority = Authority(tmp_path)
    good("context", "set", "it", "-t", "127.0.0.1:1", "--ca-file", authority.certificate)
    good("context", "set", "plain", "-t", "127.0.0.1:1")
    run("info", "--context", "it", "--retry-for", "0")
    assert os.environ["DORAD_CA_FILE"] == str(authority.certificate)
    run("info", "--context", "plain", "--retry-for", "0")
    assert "DORAD_CA_FILE" not in os.environ


def test_dorad_load_takes_a_context(two):
    other = two[1]
    good("context", "set", "other", "-t", other.target, "--use")
    words = ["-c", "1", "--requests", "3", "-o", "json"]
    result = run(*words, program=load_app, name="dorad-load")
    assert result.exit_code == 0 and len(other.generate_calls) == 3
    result = run(*words, "--context", "nope", program=load_app, name="dorad-load")
    assert result.exit_code == 64 and "there is no context 'nope'" in result.stderr
