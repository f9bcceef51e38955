"""`dorad check-adapter`, `doractl adapters check` and `check-config`: checks without a server."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from lib import zygote
from lib.server import binary, environment, serve
from safetensors.torch import load_file, save_file

DOWN = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"


def run(*words: object, **variables: str) -> subprocess.CompletedProcess:
    line = [str(word) for word in words]
    return subprocess.run(
        line, capture_output=True, text=True, timeout=120, env=environment(**variables)
    )


def dorad(*words: object) -> subprocess.CompletedProcess:
    return run(binary(), *words)


def doractl(*words: object, **variables: str) -> subprocess.CompletedProcess:
    program = "import sys; from dorad.cli import main; sys.argv[0] = 'doractl'; main()"
    return zygote.run([sys.executable, "-c", program, *words], env=environment(**variables))


@pytest.fixture
def spoilt(zoo, tmp_path) -> Path:
    """An adapter with a problem in the configuration and one in the tensors."""
    folder = tmp_path / "spoilt"
    shutil.copytree(zoo.adapter("llama2", "dora"), folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"bias": "all"}))
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors["strange"] = tensors[DOWN].clone()
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_check_finds_what_a_server_would_say_of_the_version(zoo, kind: str) -> None:
    model, adapter = zoo.model("llama2"), zoo.adapter("llama2", kind)
    checked = dorad("check-adapter", adapter, "--model", model)
    assert checked.returncode == 0, checked.stderr
    found = yaml.safe_load(checked.stdout)
    with serve(model, {"a": adapter}, {"engine.kv_bytes": 32 << 20}) as server:
        [version] = server.wire.list_adapters("a")
    assert found.pop("checked_by_the_server_only")
    assert found == {
        "kind": kind,
        "min_rank": version.min_rank,
        "max_rank": version.max_rank,
        "num_modules": version.num_modules,
        "num_parameters": version.num_parameters,
        "digest": version.digest,
    }


def test_a_check_needs_no_weights_of_the_model(zoo, tmp_path) -> None:
    shutil.copy(zoo.model("llama2") / "config.json", tmp_path)
    checked = dorad("check-adapter", zoo.adapter("llama2", "dora"), "--model", tmp_path)
    assert checked.returncode == 0, checked.stderr


def test_a_check_lists_every_problem_of_both_files(zoo, spoilt) -> None:
    checked = dorad("check-adapter", spoilt, "--model", zoo.model("llama2"))
    assert checked.returncode == 78 and not checked.stdout
    assert "[ADAPTER_BIAS_UNSUPPORTED]" in checked.stderr
    assert "strange" in checked.stderr and "[ADAPTER_TENSOR_UNEXPECTED]" in checked.stderr


def test_a_check_has_the_servers_limits(zoo) -> None:
    words = ["check-adapter", zoo.adapter("llama2", "dora"), "--set", "adapters.max_rank=1"]
    checked = dorad(*words, "--model", zoo.model("llama2"))
    assert checked.returncode == 78 and "[ADAPTER_RANK_TOO_LARGE]" in checked.stderr
    without = dorad(*words)
    assert without.returncode == 78 and "give --model DIR" in without.stderr
    missing = dorad("check-adapter", "/nowhere", "--model", zoo.model("llama2"))
    assert missing.returncode == 78 and "[ADAPTER_FOLDER_NOT_FOUND]" in missing.stderr


def test_doractl_runs_the_servers_check(zoo, spoilt) -> None:
    model, adapter = zoo.model("llama2"), zoo.adapter("llama2", "dora")
    named = {"DORAD_BINARY": str(binary())}
    checked = doractl("adapters", "check", adapter, "-m", model, "-o", "json", **named)
    assert checked.returncode == 0, checked.stderr
    found = yaml.safe_load(dorad("check-adapter", adapter, "--model", model).stdout)
    assert json.loads(checked.stdout) == {"path": str(adapter)} | found
    shown = doractl("adapters", "check", adapter, "-m", model, **named).stdout
    assert found["digest"] in shown and "left to the server" in shown
    refused = doractl("adapters", "check", spoilt, "-m", model, **named)
    assert refused.returncode == 1 and not refused.stdout
    assert "ADAPTER_BIAS_UNSUPPORTED" in refused.stderr and "strange" in refused.stderr


def test_doractl_finds_the_program_on_the_path_or_says_what_is_missing(zoo, tmp_path) -> None:
    words = ["adapters", "check", zoo.adapter("llama2", "dora"), "-m", zoo.model("llama2")]
    empty = {"DORAD_BINARY": "", "PATH": str(tmp_path)}
    missing = doractl(*words, **empty)
    assert missing.returncode == 64 and "DORAD_BINARY" in missing.stderr
    (tmp_path / "dorad").symlink_to(binary())
    found = doractl(*words, **empty)
    assert found.returncode == 0, found.stderr
    wrong = doractl(*words, DORAD_BINARY="/nowhere/dorad")
    assert wrong.returncode == 64 and "/nowhere/dorad" in wrong.stderr


def test_check_config_takes_the_model_of_serve(zoo, tmp_path) -> None:
    model = zoo.model("llama2")
    assert dorad("check-config", model).returncode == 0
    file = tmp_path / "c.yaml"
    file.write_text("model:\n  max_context: 1000000\n")
    assert "max_context" in dorad("check-config", model, "--config", file).stderr
    assert "max_context" in dorad("check-config", "--config", file, model).stderr
    assert "max_context" in dorad("check-config", file, "--model", model).stderr
    for second in ([model, "--model", model], [file, "--config", file]):
        refused = dorad("check-config", *second)
        assert refused.returncode == 64 and "a second" in refused.stderr


def test_print_config_takes_the_arguments_of_serve(tmp_path) -> None:
    printed = dorad("print-config", "/m", "--adapter", "a=/a", "--set", "engine.threads=3")
    assert printed.returncode == 0, printed.stderr
    found = yaml.safe_load(printed.stdout)
    assert found["model"]["path"] == "/m" and found["engine"]["threads"] == 3
    assert found["adapters"]["preload"] == {"a": "/a"}
