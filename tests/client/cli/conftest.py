"""The commands as functions, in this process and against the fake server."""

import os

import numpy as np
import pytest
from dorad.cli.app import app
from dorad.cli.load import app as load_app
from fake_server import image_of
from typer.testing import CliRunner


@pytest.fixture(autouse=True)
def own_environment(tmp_path, monkeypatch):
    """No context of this machine's user counts, and none of a test reaches the next one."""
    before = {name: value for name, value in os.environ.items() if name.startswith("DORAD_")}
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    yield
    for name in [name for name in os.environ if name.startswith("DORAD_")]:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def doractl(server, monkeypatch):
    monkeypatch.setenv("DORAD_TARGET", server.target)
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments, code=0, stdin=None):
        result = CliRunner().invoke(
            app, [str(a) for a in arguments], input=stdin, prog_name="doractl"
        )
        assert result.exit_code == code, (result.output, result.exception)
        return result.stderr if code else result.stdout

    return run


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "adapter"
    path.mkdir()
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_bytes(image_of({"w": np.zeros((3, 100))}))
    return path


@pytest.fixture
def dorad_load(server):
    def run(*arguments, code=0, want=""):
        arguments = ["--target", server.target, *map(str, arguments)]
        result = CliRunner().invoke(load_app, arguments, prog_name="dorad-load")
        assert result.exit_code == code, (result.output, result.exception)
        return result.stdout if want == "stdout" or not code else result.stderr

    return run
