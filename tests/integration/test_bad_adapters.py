"""Bad adapters: each is refused with its code and reason and a message that names the culprit, and
the server goes on as before. Few cases share a reason: the others are in tests/unit."""

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import pytest
import torch
from lib.bad_input import INVALID, PROMPT, WEIGHTS, answer, check, refused
from lib.server import Server, serve
from safetensors.torch import load_file, save

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def server(zoo, tmp_path_factory):
    roots = tmp_path_factory.mktemp("roots")
    shutil.copytree(zoo.adapter("llama2", "lora"), roots / "good")
    (roots / "outside").symlink_to(zoo.adapter("llama2", "dora"))
    settings = {"adapters.allowed_roots": f"[{roots}]", "engine.kv_bytes": 32 << 20}
    with serve(zoo.model("llama2"), {"good": zoo.adapter("llama2", "dora")}, settings) as running:
        running.roots = roots
        yield running


@pytest.fixture(autouse=True)
def server_goes_on(server: Server):
    """After every case the server answers as before."""
    before = answer(server)
    yield
    assert answer(server) == before


# --- Adapters whose configuration or tensors are wrong.


@dataclass(frozen=True)
class BadAdapter:
    name: str
    reason: str
    culprit: str
    # Changes the configuration and the tensors in place.
    spoil: Callable[[dict, dict], object]


def config(**changes):
    return lambda values, tensors: values.update(changes)


def without(key: str):
    return lambda values, tensors: values.pop(key)


def drop(key: str):
    return lambda values, tensors: tensors.pop(key)


def replace(key: str, change: Callable[[torch.Tensor], torch.Tensor]):
    def spoil(values: dict, tensors: dict) -> None:
        tensors[key] = change(tensors[key]).contiguous()

    return spoil


def add(key: str, *shape: int):
    return lambda values, tensors: tensors.update({key: torch.ones(shape)})


def poison(value: float):
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[-1] = value
        return tensor

    return change


BAD_ADAPTERS = [
    BadAdapter("zero-rank", "ADAPTER_CONFIG_INVALID", ":r", config(r=0)),
    BadAdapter("huge-rank", "ADAPTER_RANK_TOO_LARGE", "1000000", config(r=1_000_000)),
    BadAdapter("no-alpha", "ADAPTER_CONFIG_MISSING_FIELD", "lora_alpha", without("lora_alpha")),
    BadAdapter("no-type", "ADAPTER_CONFIG_MISSING_FIELD", "peft_type", without("peft_type")),
    BadAdapter("adalora", "ADAPTER_TYPE_UNSUPPORTED", "ADALORA", config(peft_type="ADALORA")),
    BadAdapter("task", "ADAPTER_TASK_UNSUPPORTED", "SEQ_CLS", config(task_type="SEQ_CLS")),
    BadAdapter("bias", "ADAPTER_BIAS_UNSUPPORTED", "bias", config(bias="all")),
    BadAdapter("lora-bias", "ADAPTER_LORA_BIAS_UNSUPPORTED", "lora_bias", config(lora_bias=True)),
    BadAdapter(
        "modules-to-save",
        "ADAPTER_MODULES_TO_SAVE_UNSUPPORTED",
        "modules_to_save",
        config(modules_to_save=["lm_head"]),
    ),
    BadAdapter(
        "replication",
        "ADAPTER_LAYER_REPLICATION_UNSUPPORTED",
        "layer_replication",
        config(layer_replication=[[0, 2], [1, 3]]),
    ),
    BadAdapter("pissa", "ADAPTER_INIT_CHANGES_BASE", "pissa", config(init_lora_weights="pissa")),
    BadAdapter("init", "ADAPTER_INIT_UNSUPPORTED", "magic", config(init_lora_weights="magic")),
    BadAdapter(
        "unknown-key", "ADAPTER_CONFIG_UNKNOWN_KEY", "use_sorcery", config(use_sorcery=True)
    ),
    BadAdapter(
        "unknown-module",
        "ADAPTER_TARGET_UNKNOWN",
        "qq_proj",
        config(target_modules=["q_proj", "qq_proj"]),
    ),
    BadAdapter(
        "zero-matches", "ADAPTER_NO_TARGETS", "target_modules", config(target_modules="nothing.*")
    ),
    BadAdapter(
        "bad-regex", "ADAPTER_PATTERN_UNSUPPORTED", "target_modules", config(target_modules="(q_")
    ),
    BadAdapter("wrong-rank", "ADAPTER_RANK_MISMATCH", "q_proj", config(r=4)),
    BadAdapter(
        "missing-a", "ADAPTER_TENSOR_MISSING", f"{Q0}.lora_A.weight", drop(f"{Q0}.lora_A.weight")
    ),
    BadAdapter(
        "missing-magnitude",
        "ADAPTER_MAGNITUDE_MISSING",
        f"{Q0}.lora_magnitude_vector",
        drop(f"{Q0}.lora_magnitude_vector"),
    ),
    BadAdapter(
        "duplicate-magnitude",
        "ADAPTER_TENSOR_DUPLICATE",
        f"{Q0}.lora_magnitude_vector",
        add(f"{Q0}.lora_magnitude_vector.weight", 64),
    ),
    BadAdapter(
        "short-magnitude",
        "ADAPTER_TENSOR_SHAPE",
        f"{Q0}.lora_magnitude_vector",
        replace(f"{Q0}.lora_magnitude_vector", lambda tensor: tensor[:-1]),
    ),
    BadAdapter(
        "flat-b",
        "ADAPTER_TENSOR_SHAPE",
        f"{Q0}.lora_B.weight",
        replace(f"{Q0}.lora_B.weight", lambda tensor: tensor.reshape(-1)),
    ),
    BadAdapter(
        "extra-tensor",
        "ADAPTER_TENSOR_UNEXPECTED",
        "layers.9.self_attn",
        add("base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight", 8, 64),
    ),
    BadAdapter(
        "nan",
        "ADAPTER_NOT_FINITE",
        f"{Q0}.lora_A.weight",
        replace(f"{Q0}.lora_A.weight", poison(float("nan"))),
    ),
    BadAdapter(
        "infinity",
        "ADAPTER_NOT_FINITE",
        f"{Q0}.lora_magnitude_vector",
        replace(f"{Q0}.lora_magnitude_vector", poison(float("inf"))),
    ),
    BadAdapter(
        "int-tensor",
        "SAFETENSORS_DTYPE",
        "I64",
        replace(f"{Q0}.lora_A.weight", lambda tensor: tensor.to(torch.int64)),
    ),
    BadAdapter(
        "double-tensor",
        "SAFETENSORS_DTYPE",
        "F64",
        replace(f"{Q0}.lora_A.weight", lambda tensor: tensor.to(torch.float64)),
    ),
]


@pytest.mark.parametrize("case", BAD_ADAPTERS, ids=lambda case: case.name)
def test_bad_adapters(server: Server, zoo, case: BadAdapter) -> None:
    folder = zoo.adapter("llama2", "dora")
    values = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / WEIGHTS)
    case.spoil(values, tensors)
    refusal = refused(server.wire.publish_bytes, "bad", values, save(tensors))
    check(refusal, case.reason, case.culprit)


def test_all_problems_of_an_adapter_are_listed_at_once(server: Server, zoo) -> None:
    folder = zoo.adapter("llama2", "dora")
    values = json.loads((folder / "adapter_config.json").read_text())
    values |= dict(r=0, lora_alpha=-1, bias="all", use_sorcery=1)
    refusal = refused(server.wire.publish_bytes, "bad", values, save({"x": torch.ones(1)}))
    assert refusal.code == INVALID
    fields = " ".join(field for field, *_ in refusal.violations)
    assert all(word in fields for word in (":r", "lora_alpha", "bias", "use_sorcery")), fields


BAD_CONFIG_TEXTS = [
    ("empty", "", "PUBLISH_CONFIG_SIZE"),
    ("cut", '{"r": 8', "ADAPTER_CONFIG_NOT_JSON"),
    ("duplicate-key", '{"r": 8, "r": 16}', "ADAPTER_CONFIG_DUPLICATE_KEY"),
    ("deep", '{"r": ' + "[" * 5000 + "]" * 5000 + "}", "ADAPTER_CONFIG_TOO_DEEP"),
]


@pytest.mark.parametrize(
    "text, reason",
    [case[1:] for case in BAD_CONFIG_TEXTS],
    ids=[case[0] for case in BAD_CONFIG_TEXTS],
)
def test_bad_config_texts(server: Server, zoo, text: str, reason: str) -> None:
    image = (zoo.adapter("llama2", "dora") / WEIGHTS).read_bytes()
    refusal = refused(server.wire.publish_bytes, "bad", text, image)
    check(refusal, reason, "adapter_config")


# --- Safetensors images that lie.


def raw(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = (
        header
        if isinstance(header, bytes)
        else (header if isinstance(header, str) else json.dumps(header)).encode()
    )
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def one(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


EIGHT = bytes(8)
BAD_IMAGES = [
    ("no-bytes", b"", "SAFETENSORS_HEADER_TOO_SMALL"),
    ("length-beyond-file", raw({}, length=1000), "SAFETENSORS_HEADER_LENGTH"),
    ("length-2-64", raw({}, length=2**64 - 1), "SAFETENSORS_HEADER_TOO_LARGE"),
    ("header-not-json", raw("{x"), "SAFETENSORS_HEADER_JSON"),
    ("duplicate-key", raw('{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
                          '"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', EIGHT),
     "SAFETENSORS_DUPLICATE_KEY"),
    ("fractional-offset", raw(one(offsets=(0, 8.0)), EIGHT), "SAFETENSORS_OFFSETS"),
    ("hole", raw(one(offsets=(4, 12)), bytes(12)), "SAFETENSORS_OFFSETS"),
    ("beyond-the-end", raw(one(shape=(4,), offsets=(0, 16)), EIGHT), "SAFETENSORS_INCOMPLETE"),
    ("size-not-shape", raw(one(shape=(3,)), EIGHT), "SAFETENSORS_SIZE"),
    ("negative-shape", raw(one(shape=(-2,)), EIGHT), "SAFETENSORS_SHAPE"),
    ("unknown-dtype", raw(one(dtype="F7"), EIGHT), "SAFETENSORS_DTYPE"),
    ("long-name", raw({"n" * 600: one()["x"]}, EIGHT), "SAFETENSORS_NAME"),
]  # fmt: skip


@pytest.mark.parametrize(
    "image, reason", [case[1:] for case in BAD_IMAGES], ids=[case[0] for case in BAD_IMAGES]
)
def test_bad_images(server: Server, zoo, image: bytes, reason: str) -> None:
    values = (zoo.adapter("llama2", "dora") / "adapter_config.json").read_text()
    refusal = refused(server.wire.publish_bytes, "bad", values, image)
    if image:
        assert (refusal.code, refusal.reason) == (INVALID, reason), refusal
        # The header as a whole, or the tensor.
        assert refusal.violations[0][0] in ("header", "x", "y"), refusal
    else:
        assert refusal.code == INVALID and refusal.reason


def test_a_truncated_image(server: Server, zoo) -> None:
    folder = zoo.adapter("llama2", "dora")
    image = (folder / WEIGHTS).read_bytes()
    refusal = refused(
        server.wire.publish_bytes,
        "bad",
        (folder / "adapter_config.json").read_text(),
        image[: len(image) // 2],
    )
    assert refusal.code == INVALID and refusal.reason.startswith("SAFETENSORS_")


# --- Names and paths.

BAD_NAMES = ["", "../x", "a/b", "A", "-a", "a-", ".a", "a.", "a b", "ä", "a\n", "x" * 129, "a@1"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names(server: Server, zoo, name: str) -> None:
    refusal = refused(server.wire.publish, name, zoo.adapter("llama2", "lora"))
    assert (refusal.code, refusal.reason) == (INVALID, "ADAPTER_NAME_INVALID"), refusal
    assert "\n" not in refusal.message


@pytest.mark.parametrize(
    "ref", ["../x", "a@", "@1", "a@0", "a@-1", "a@x", "a@1@2", "A", "a@" + "9" * 30]
)
def test_bad_references(server: Server, ref: str) -> None:
    refusal = refused(server.wire.generate, PROMPT, adapter=ref)
    assert (refusal.code, refusal.reason) == (INVALID, "ADAPTER_NAME_INVALID"), refusal


@pytest.mark.parametrize("version", [0, -1])
def test_bad_versions(server: Server, zoo, version: int) -> None:
    refusal = refused(server.wire.publish, "v", zoo.adapter("llama2", "lora"), version=version)
    assert (refusal.code, refusal.reason) == (INVALID, "ADAPTER_VERSION_INVALID"), refusal


@pytest.mark.parametrize("path", ["{roots}/../..", "/etc", "{roots}/outside", "{roots}x"])
def test_paths_outside_the_roots(server: Server, path: str) -> None:
    refusal = refused(server.wire.publish_path, "p", path.format(roots=server.roots))
    assert refusal.code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.NOT_FOUND), refusal
    assert refusal.reason in ("PATH_NOT_ALLOWED", "ADAPTER_FOLDER_NOT_FOUND"), refusal


@pytest.mark.parametrize("path", ["good", "./good", "../good"])
def test_relative_paths(server: Server, path: str) -> None:
    refusal = refused(server.wire.publish_path, "p", path)
    assert (refusal.code, refusal.reason) == (INVALID, "PATH_NOT_ABSOLUTE"), refusal


def test_a_path_inside_the_roots_is_served(server: Server) -> None:
    assert server.wire.publish_path("fine", server.roots / "good").adapter.name == "fine"


def test_a_missing_folder_inside_the_roots(server: Server) -> None:
    refusal = refused(server.wire.publish_path, "p", server.roots / "missing")
    check(refusal, "ADAPTER_FOLDER_NOT_FOUND", "missing", grpc.StatusCode.NOT_FOUND)
