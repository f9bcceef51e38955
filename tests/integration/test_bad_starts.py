"""Bad models, preloaded adapters, configurations and command lines: the program ends with one
clear line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lib.bad_input import WEIGHTS
from lib.server import binary, command, run_line
from safetensors.torch import load_file, save_file


def run_to_end(line: list[str]) -> tuple[int, str]:
    done = run_line(line)
    return done.returncode, done.stdout + done.stderr


def assert_clear_failure(line: list[str], *culprits: str) -> None:
    code, said = run_to_end(line)
    assert code in (64, 78), (code, said)  # docs/reference/errors.md
    assert "dorad ready" not in said
    for culprit in culprits:
        assert culprit in said, said


def edit(**changes):
    def spoil(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


def edit_weights(change: Callable[[dict], object]):
    def spoil(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return spoil


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def nan_weight(tensors: dict) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")


def narrow(tensors: dict) -> None:
    key = "model.layers.2.self_attn.o_proj.weight"
    tensors[key] = tensors[key][:, :-1].contiguous()


BAD_MODELS = [
    ("no-config", ["config.json"], lambda folder: (folder / "config.json").unlink()),
    ("config-not-json", ["config.json"], lambda folder: (folder / "config.json").write_text("{")),
    ("no-weights", ["model.safetensors"], lambda folder: (folder / "model.safetensors").unlink()),
    ("truncated", ["model.safetensors"], truncate),
    ("unknown-family", ["gpt_oss"], edit(model_type="gpt_oss", architectures=["GptOss"])),
    ("quantised", ["quantization_config"], edit(quantization_config={"quant_method": "gptq"})),
    ("activation", ["gelu"], edit(hidden_act="gelu")),
    ("rope-kind", ["spiral"], edit(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4})),
    ("heads", ["num_key_value_heads"], edit(num_key_value_heads=3)),
    ("zero-layers", ["num_hidden_layers"], edit(num_hidden_layers=0)),
    ("negative-vocabulary", ["vocab_size"], edit(vocab_size=-300)),
    ("text-size", ["hidden_size"], edit(hidden_size="64")),
    ("more-layers", ["model.layers.3."], edit(num_hidden_layers=4)),
    ("fewer-layers", ["model.layers.2."], edit(num_hidden_layers=2)),
    ("vocabulary", ["embed_tokens"], edit(vocab_size=301)),
    (
        "missing-tensor",
        ["model.layers.0.mlp.gate_proj.weight"],
        edit_weights(lambda tensors: tensors.pop("model.layers.0.mlp.gate_proj.weight")),
    ),
    (
        "extra-tensor",
        ["model.extra.weight"],
        edit_weights(lambda tensors: tensors.update({"model.extra.weight": torch.ones(3)})),
    ),
    ("shape", ["model.layers.2.self_attn.o_proj.weight"], edit_weights(narrow)),
    ("nan-weight", ["model.layers.1.mlp.up_proj.weight"], edit_weights(nan_weight)),
]  # fmt: skip


@pytest.mark.parametrize(
    "culprits, spoil", [case[1:] for case in BAD_MODELS], ids=[case[0] for case in BAD_MODELS]
)
def test_bad_models(zoo, tmp_path, culprits: list[str], spoil: Callable) -> None:
    folder = tmp_path / "model"
    shutil.copytree(zoo.model("llama2"), folder)
    spoil(folder)
    assert_clear_failure(command(folder), *culprits)


def test_bad_shard_index(zoo, tmp_path) -> None:
    source = zoo.model("llama_yarn")
    for name, change, culprit in [
        (
            "missing-shard",
            lambda folder, index: next(folder.glob("model-00002*")).unlink(),
            "00002",
        ),
        (
            "escaping-shard",
            lambda folder, index: index["weight_map"].update(
                {"lm_head.weight": "../x.safetensors"}
            ),
            "../x.safetensors",
        ),
        (
            "unlisted",
            lambda folder, index: index["weight_map"].pop("lm_head.weight"),
            "lm_head.weight",
        ),
    ]:
        folder = tmp_path / name
        shutil.copytree(source, folder)
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(folder, index)
        path.write_text(json.dumps(index))
        assert_clear_failure(command(folder), culprit)


def test_missing_model_folder(tmp_path) -> None:
    assert_clear_failure(command(tmp_path / "nowhere"), "no folder", "nowhere", "MODEL_NOT_FOUND")
    assert_clear_failure(command("Qwen/Qwen3-8B"), "none is downloaded")
    (tmp_path / "file").touch()
    assert_clear_failure(command(tmp_path / "file"), "no folder")
    assert_clear_failure(command(tmp_path), "config.json", "MODEL_NOT_FOUND")


def test_no_model_at_all() -> None:
    assert_clear_failure(command(None), "model")


def test_bad_preloaded_adapter(zoo, tmp_path) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(zoo.adapter("llama2", "dora"), folder)
    (folder / WEIGHTS).unlink()
    assert_clear_failure(command(zoo.model("llama2"), {"a": folder}), "adapter_model.safetensors")
    other = zoo.adapter("slow", "dora")
    assert_clear_failure(command(zoo.model("llama2"), {"a": other}), "q_proj")


BAD_CONFIGS = [
    ("unknown-key", "engine:\n  kv_byte: 1\n", ["2", "kv_byte", "kv_bytes"]),
    ("unknown-section", "engin:\n  kv_bytes: 1\n", ["1", "engin", "engine"]),
    ("wrong-type", "engine:\n  max_step_tokens: many\n", ["2", "max_step_tokens", "many"]),
    ("fraction", "engine:\n  max_step_tokens: 1.5\n", ["2", "max_step_tokens"]),
    ("out-of-range", "engine:\n  max_step_tokens: 0\n", ["2", "max_step_tokens"]),
    ("choice", "model:\n  compute_dtype: fp8\n", ["2", "compute_dtype", "fp8"]),
    ("boolean", "engine:\n  prefix_cache: maybe\n", ["2", "prefix_cache"]),
    ("duplicate", "log:\n  level: info\n  level: debug\n", ["3", "level"]),
    ("syntax", "log: [\n", ["c.yaml"]),
    ("list", "- a\n", ["c.yaml"]),
    ("address", "server:\n  grpc_listen: nowhere\n", ["2", "grpc_listen"]),
    ("port", "server:\n  grpc_listen: 127.0.0.1:99999\n", ["2", "grpc_listen"]),
    ("alias-bomb", "a: &a [x]\nb: &b [*a,*a,*a,*a]\nc: [*b,*b,*b,*b]\n", ["c.yaml"]),
]


@pytest.mark.parametrize(
    "text, culprits", [case[1:] for case in BAD_CONFIGS], ids=[case[0] for case in BAD_CONFIGS]
)
def test_bad_configurations(tmp_path, text: str, culprits: list[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert_clear_failure([str(binary()), "check-config", str(path)], "[CONFIG_", *culprits)


def test_good_configuration_passes(tmp_path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("engine:\n  kv_bytes: 64MiB\n")
    code, said = run_to_end([str(binary()), "check-config", str(path)])
    assert code == 0, said


@pytest.mark.parametrize(
    "setting", ["engine.kv_byte=1", "kv_bytes=1", "engine.kv_bytes", "engine.threads=-1", "=1"]
)
def test_bad_settings(zoo, setting: str) -> None:
    line = command(zoo.model("llama2")) + ["--set", setting]
    assert_clear_failure(line, setting.partition("=")[0] or "--set")


def test_unknown_commands_and_flags() -> None:
    for words in (["frobnicate"], ["serve", "--modle", "x"], ["check-config"], []):
        code, said = run_to_end([str(binary()), *words])
        assert 0 < code < 128 and said.strip(), words


def test_a_failed_start_is_told_in_the_form_of_the_log(zoo, tmp_path) -> None:
    """A collector of JSON lines must not lose the last and most wanted one."""
    broken = tmp_path / "model"
    shutil.copytree(zoo.model("llama2"), broken)
    edit(num_attention_heads=0, hidden_size="wide")(broken)
    for line in (command(tmp_path / "nowhere"), command(broken)):
        run = run_line(line)
        lines = [json.loads(text) for text in run.stderr.splitlines()]
        assert run.returncode == 78 and not run.stdout
        assert lines[-1]["level"] == "error" and lines[-1]["msg"] == "the server does not start"
        assert lines[-1]["reason"] and lines[-1]["error"]
    plain = run_to_end([*command(tmp_path / "nowhere"), "--set", "log.format=text"])
    assert "dorad: " in plain[1] and "[MODEL_NOT_FOUND]" in plain[1]
