"""--output and --version of every command."""

import json

import numpy as np
import pytest
import yaml
from dorad.cli.app import app
from dorad.cli.common import Output
from dorad.cli.load import app as load_app
from typer.testing import CliRunner

COMMANDS = [
    ("info",),
    ("health",),
    ("pause", "--mode", "wait"),
    ("resume",),
    ("sleep", "kv"),
    ("wake",),
    ("limit-gpu-share", "0.5"),
    ("end-gpu-share-limit",),
    ("abort", "r1"),
    ("generate", "--token-ids", "1,2", "--max-tokens", "2", "--logprobs", "raw", "--seed", "1"),
    ("score", "--token-ids", "1,2"),
    ("adapters", "list"),
    ("adapters", "show", "a"),
    ("adapters", "activate", "a@1"),
    ("adapters", "rollback", "a", "--to", "1"),
    ("context", "list"),
    ("context", "show", "here"),
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_yaml_and_json_have_the_same_form(doractl, folder, words):
    doractl("adapters", "publish", "a", folder)
    doractl("context", "set", "here", "-t", "127.0.0.1:1")
    as_json = json.loads(doractl(*words, "--output", "json"))
    as_yaml = yaml.safe_load(doractl(*words, "--output", "yaml"))
    assert type(as_json) is type(as_yaml) and as_json
    if isinstance(as_json, dict):  # Some values count calls.
        assert list(as_json) == list(as_yaml)


def test_values_are_the_same_in_yaml_as_in_json(capsys):
    value = {
        "text": "a: [b]\n- ö '1e3' #",
        "number as text": "007",
        "enum": Output.YAML,
        "array": np.array([1.5, np.nan], np.float32),
        "none": None,
        "empty": {},
    }
    Output.JSON.show(value, lambda: None)
    as_json = json.loads(capsys.readouterr().out)
    Output.YAML.show(value, lambda: None)
    assert yaml.safe_load(capsys.readouterr().out) == as_json
    assert as_json["array"] == [1.5, None]


def test_a_load_report_is_yaml_on_request(dorad_load):
    report = yaml.safe_load(dorad_load("-c", 1, "--requests", 2, "-o", "yaml"))
    assert report["requests"] == 2 and report["e2e_ms"]["mean"] > 0


@pytest.mark.parametrize("app, words", [
    (app, ["--version"]), (app, ["gateway", "--version"]), (load_app, ["--version"]),
])  # fmt: skip
def test_every_program_has_its_version(app, words):
    import dorad

    result = CliRunner().invoke(app, words, prog_name="the-program")
    assert result.exit_code == 0 and result.stdout == f"the-program {dorad.__version__}\n"
