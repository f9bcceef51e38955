"""Completion in a shell, as the shells call it."""

import os
import subprocess
import sys

import pytest
from fake_server import FakeServer
from lib.server import environment, free_port
from lib.zygote import run

PROGRAM = "import sys; from dorad.cli import main; sys.argv[0] = 'doractl'; main()"


@pytest.fixture(scope="module")
def server():
    import dorad
    import numpy as np

    with FakeServer() as fake, dorad.Client(fake.target) as client:
        for name in ("pirate", "pirate", "poet"):
            client.publish(name, tensors={"w": np.zeros((3, 3), "float32")}, config={})
        yield fake


def completed(*words, shell="bash", **variables):
    """The candidates for the last word."""
    line = ["doractl", *words]
    asked = {"_DORACTL_COMPLETE": f"complete_{shell}", **variables}
    if shell == "bash":
        asked |= {"COMP_WORDS": "\n".join(line), "COMP_CWORD": str(len(line) - 1)}
    else:
        asked |= {"_TYPER_COMPLETE_ARGS": " ".join(line), "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    result = run([sys.executable, "-c", PROGRAM], env=environment(**asked))
    assert result.stderr == "" and result.returncode in (0, 1), result
    return result.stdout.split()


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["adapters", "show", "pi"], ["pirate", "pirate@1", "pirate@2"]),
        (["adapters", "retire", "p"], ["pirate@1", "pirate@2", "poet@1"]),
        (["adapters", "activate", "pirate@"], ["pirate@1", "pirate@2"]),
        (["adapters", "rollback", "p"], ["pirate", "poet"]),
        (["adapters", "list", "po"], ["poet"]),
        (["generate", "-a", "po"], ["poet", "poet@1"]),
        (["generate", "-a", "poet", "-a", "pi"], ["pirate", "pirate@1", "pirate@2"]),
        (["score", "hello", "--adapter", "po"], ["poet", "poet@1"]),
    ],
)
def test_adapters_are_completed_from_the_server(server, words, wanted):
    assert completed(*words, DORAD_TARGET=server.target) == wanted


def test_the_server_may_be_named_anywhere_on_the_line(server, tmp_path):
    nowhere = {"DORAD_TARGET": f"127.0.0.1:{free_port()}"}
    assert completed("-t", server.target, "adapters", "list", "po", **nowhere) == ["poet"]
    assert completed("adapters", "list", "-t", server.target, "po", **nowhere) == ["poet"]
    (tmp_path / "dorad").mkdir()
    text = f"contexts: {{here: {{target: '{server.target}'}}}}"
    (tmp_path / "dorad" / "contexts.yaml").write_text(text)
    home = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert completed("--context", "here", "adapters", "list", "po", **home) == ["poet"]
    assert completed("info", "--context", "h", **home) == ["here"]
    assert completed("context", "use", "", **home) == ["here"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_the_same(server, shell):
    found = completed("adapters", "list", "po", shell=shell, DORAD_TARGET=server.target)
    assert "poet" in " ".join(found) and "pirate" not in " ".join(found)


def test_commands_and_options_are_completed_without_a_server():
    assert completed("adap") == ["adapters"]
    assert "--retry-for" in completed("info", "--re")


@pytest.mark.parametrize("target", ["127.0.0.1:1", "http://nonsense", ""])
def test_what_cannot_be_asked_completes_nothing(target):
    assert completed("adapters", "show", "p", DORAD_TARGET=target or "127.0.0.1:1") == []


def test_bash_runs_the_script_of_show_completion(server, tmp_path):
    program = tmp_path / "doractl"
    program.write_text(f"#!{sys.executable}\n{PROGRAM}\n")
    program.chmod(0o755)
    script = """
        eval "$(doractl --show-completion)"
        COMP_WORDS=(doractl adapters list po) COMP_CWORD=3
        _doractl_completion doractl
        echo "${COMPREPLY[@]}"
    """
    path = f"{tmp_path}:{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-c", script],
        capture_output=True, text=True, timeout=120,
        env=environment(PATH=path, DORAD_TARGET=server.target),
    )  # fmt: skip
    assert result.stdout == "poet\n", result
