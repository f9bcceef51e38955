"""Bad adapters, models, configurations and requests: each is refused with its code and reason and a
message that names the culprit, and the server goes on as before."""

import json
import shutil
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import torch
from dorad.v1 import adapters_pb2, inference_pb2
from lib.server import Server, binary, command, environment, serve, wait_until
from lib.tiny_models import CONTEXT, VOCAB
from lib.wire import RAW, Failure, failure, generate_request
from safetensors.torch import load_file, save, save_file

INVALID = grpc.StatusCode.INVALID_ARGUMENT
PROMPT = [11, 12, 13, 14, 15]
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def server(zoo, tmp_path_factory):
    roots = tmp_path_factory.mktemp("roots")
    shutil.copytree(zoo.adapter("llama2", "lora"), roots / "good")
    (roots / "outside").symlink_to(zoo.adapter("llama2", "dora"))
    settings = {
        "adapters.allowed_roots": f"[{roots}]",
        "limits.max_tokens": 100,
        "limits.max_n": 16,
        "limits.max_logprobs_k": 20,
        "limits.max_chosen_ids": 50,
        "limits.max_stop_ids": 8,
        "limits.max_score_tokens": 2000,
        "engine.kv_bytes": 32 << 20,
    }
    with serve(zoo.model("llama2"), {"good": zoo.adapter("llama2", "dora")}, settings) as running:
        running.roots = roots
        yield running


@pytest.fixture(scope="module")
def reference(server: Server) -> list[int]:
    return answer(server)


def answer(server: Server) -> list[int]:
    options = dict(adapter="good", temperature=0.0, max_tokens=8, ignore_eos=True)
    return server.wire.generate(PROMPT, **options)[0].tokens


@pytest.fixture(autouse=True)
def server_goes_on(request):
    """After every case that met the running server, it answers as before."""
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        assert answer(server) == request.getfixturevalue("reference")


def refused(call: Callable, *args, **kwargs) -> Failure:
    with pytest.raises(grpc.RpcError) as caught:
        call(*args, **kwargs)
    result = failure(caught.value)
    assert result.domain in ("dorad", ""), result
    return result


def check(refusal: Failure, reason: str, culprit: str, code=INVALID) -> None:
    assert refusal.code == code, refusal
    assert refusal.reason == reason, refusal
    said = refusal.message + " ".join(" ".join(item) for item in refusal.violations)
    assert culprit in said, refusal


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


def double_rank(values: dict, tensors: dict) -> None:
    tensors[f"{Q0}.lora_A.weight"] = tensors[f"{Q0}.lora_A.weight"].repeat(2, 1)
    tensors[f"{Q0}.lora_B.weight"] = tensors[f"{Q0}.lora_B.weight"].repeat(1, 2)


BAD_ADAPTERS = [
    BadAdapter("zero-rank", "ADAPTER_CONFIG_INVALID", ":r", config(r=0)),
    BadAdapter("negative-rank", "ADAPTER_CONFIG_INVALID", ":r", config(r=-8)),
    BadAdapter("fractional-rank", "ADAPTER_CONFIG_INVALID", ":r", config(r=8.5)),
    BadAdapter("text-rank", "ADAPTER_CONFIG_INVALID", ":r", config(r="8")),
    BadAdapter("huge-rank", "ADAPTER_RANK_TOO_LARGE", "1000000", config(r=1_000_000)),
    BadAdapter("rank-2-63", "ADAPTER_RANK_TOO_LARGE", ":r", config(r=2**63)),
    BadAdapter("negative-alpha", "ADAPTER_CONFIG_INVALID", "lora_alpha", config(lora_alpha=-16)),
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
    BadAdapter("no-targets", "ADAPTER_NO_TARGETS", "target_modules", config(target_modules=[])),
    BadAdapter(
        "all-excluded",
        "ADAPTER_NO_TARGETS",
        "target_modules",
        config(exclude_modules=".*"),
    ),
    BadAdapter(
        "bad-regex", "ADAPTER_PATTERN_UNSUPPORTED", "target_modules", config(target_modules="(q_")
    ),
    BadAdapter(
        "pattern-rank",
        "ADAPTER_CONFIG_INVALID",
        "rank_pattern.q_proj",
        config(rank_pattern={"q_proj": 0}),
    ),
    BadAdapter("rank-mismatch", "ADAPTER_RANK_MISMATCH", "layers.0.self_attn.q_proj", double_rank),
    BadAdapter("wrong-rank", "ADAPTER_RANK_MISMATCH", "q_proj", config(r=4)),
    BadAdapter(
        "missing-a", "ADAPTER_TENSOR_MISSING", f"{Q0}.lora_A.weight", drop(f"{Q0}.lora_A.weight")
    ),
    BadAdapter(
        "missing-b", "ADAPTER_TENSOR_MISSING", f"{Q0}.lora_B.weight", drop(f"{Q0}.lora_B.weight")
    ),
    BadAdapter(
        "missing-magnitude",
        "ADAPTER_MAGNITUDE_MISSING",
        f"{Q0}.lora_magnitude_vector",
        drop(f"{Q0}.lora_magnitude_vector"),
    ),
    BadAdapter(
        "magnitude-without-dora",
        "ADAPTER_TENSOR_UNEXPECTED",
        "lora_magnitude_vector",
        config(use_dora=False),
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
        "transposed-a",
        "ADAPTER_TENSOR_SHAPE",
        f"{Q0}.lora_A.weight",
        replace(f"{Q0}.lora_A.weight", lambda tensor: tensor.t()),
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
        "untargeted-tensor",
        "ADAPTER_TENSOR_UNEXPECTED",
        "lm_head",
        add("base_model.model.lm_head.lora_A.weight", 8, 64),
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
def test_bad_adapters(server: Server, reference, zoo, case: BadAdapter) -> None:
    folder = zoo.adapter("llama2", "dora")
    values = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / WEIGHTS)
    case.spoil(values, tensors)
    refusal = refused(server.wire.publish_bytes, "bad", values, save(tensors))
    check(refusal, case.reason, case.culprit)


def test_all_problems_of_an_adapter_are_listed_at_once(server: Server, reference, zoo) -> None:
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
    ("list", "[]", "ADAPTER_CONFIG_NOT_JSON"),
    ("nan", '{"r": NaN}', "ADAPTER_CONFIG_NOT_JSON"),
    ("duplicate-key", '{"r": 8, "r": 16}', "ADAPTER_CONFIG_DUPLICATE_KEY"),
    ("deep", '{"r": ' + "[" * 5000 + "]" * 5000 + "}", "ADAPTER_CONFIG_TOO_DEEP"),
]


@pytest.mark.parametrize(
    "text, reason",
    [case[1:] for case in BAD_CONFIG_TEXTS],
    ids=[case[0] for case in BAD_CONFIG_TEXTS],
)
def test_bad_config_texts(server: Server, reference, zoo, text: str, reason: str) -> None:
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
    ("seven-bytes", bytes(7), "SAFETENSORS_HEADER_TOO_SMALL"),
    ("length-beyond-file", raw({}, length=1000), "SAFETENSORS_HEADER_LENGTH"),
    ("length-2-64", raw({}, length=2**64 - 1), "SAFETENSORS_HEADER_TOO_LARGE"),
    ("header-not-json", raw("{x"), "SAFETENSORS_HEADER_JSON"),
    ("header-list", raw([]), "SAFETENSORS_HEADER_JSON"),
    ("header-not-utf8", raw(b'{"\xff": 1}'), "SAFETENSORS_HEADER_JSON"),
    ("duplicate-key", raw('{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
                          '"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', EIGHT),
     "SAFETENSORS_DUPLICATE_KEY"),
    ("duplicate-field", raw('{"x":{"dtype":"F32","dtype":"F16","shape":[2],'
                            '"data_offsets":[0,8]}}', EIGHT), "SAFETENSORS_DUPLICATE_KEY"),
    ("negative-offset", raw(one(offsets=(-8, 0)), EIGHT), "SAFETENSORS_OFFSETS"),
    ("backward-offsets", raw(one(offsets=(8, 0)), EIGHT), "SAFETENSORS_OFFSETS"),
    ("one-offset", raw(one(offsets=(0,)), EIGHT), "SAFETENSORS_OFFSETS"),
    ("fractional-offset", raw(one(offsets=(0, 8.0)), EIGHT), "SAFETENSORS_OFFSETS"),
    ("hole", raw(one(offsets=(4, 12)), bytes(12)), "SAFETENSORS_OFFSETS"),
    ("overlap", raw(one() | {"y": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}},
                    bytes(12)), "SAFETENSORS_OFFSETS"),
    ("beyond-the-end", raw(one(shape=(4,), offsets=(0, 16)), EIGHT), "SAFETENSORS_INCOMPLETE"),
    ("trailing-bytes", raw(one(), bytes(9)), "SAFETENSORS_INCOMPLETE"),
    ("size-not-shape", raw(one(shape=(3,)), EIGHT), "SAFETENSORS_SIZE"),
    ("shape-overflow", raw(one(shape=(2**40, 2**40)), EIGHT), "SAFETENSORS_SIZE"),
    ("negative-shape", raw(one(shape=(-2,)), EIGHT), "SAFETENSORS_SHAPE"),
    ("rank-nine", raw(one(shape=(1,) * 8 + (2,)), EIGHT), "SAFETENSORS_SHAPE"),
    ("unknown-dtype", raw(one(dtype="F7"), EIGHT), "SAFETENSORS_DTYPE"),
    ("number-dtype", raw(one(dtype=32), EIGHT), "SAFETENSORS_DTYPE"),
    ("long-name", raw({"n" * 600: one()["x"]}, EIGHT), "SAFETENSORS_NAME"),
]  # fmt: skip


@pytest.mark.parametrize(
    "image, reason", [case[1:] for case in BAD_IMAGES], ids=[case[0] for case in BAD_IMAGES]
)
def test_bad_images(server: Server, reference, zoo, image: bytes, reason: str) -> None:
    values = (zoo.adapter("llama2", "dora") / "adapter_config.json").read_text()
    refusal = refused(server.wire.publish_bytes, "bad", values, image)
    if image:
        assert (refusal.code, refusal.reason) == (INVALID, reason), refusal
        # The header as a whole, or the tensor.
        assert refusal.violations[0][0] in ("header", "x", "y"), refusal
    else:
        assert refusal.code == INVALID and refusal.reason


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.999])
def test_truncated_images(server: Server, reference, zoo, keep: float) -> None:
    folder = zoo.adapter("llama2", "dora")
    image = (folder / WEIGHTS).read_bytes()
    refusal = refused(
        server.wire.publish_bytes,
        "bad",
        (folder / "adapter_config.json").read_text(),
        image[: int(len(image) * keep)],
    )
    assert refusal.code == INVALID and refusal.reason.startswith("SAFETENSORS_")


# --- Names and paths.

BAD_NAMES = ["", "../x", "a/b", "A", "-a", "a-", ".a", "a.", "a b", "ä", "a\n", "x" * 129, "a@1"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names(server: Server, reference, zoo, name: str) -> None:
    refusal = refused(server.wire.publish, name, zoo.adapter("llama2", "lora"))
    assert (refusal.code, refusal.reason) == (INVALID, "ADAPTER_NAME_INVALID"), refusal
    assert "\n" not in refusal.message


@pytest.mark.parametrize(
    "ref", ["../x", "a@", "@1", "a@0", "a@-1", "a@x", "a@1@2", "A", "a@" + "9" * 30]
)
def test_bad_references(server: Server, reference, ref: str) -> None:
    refusal = refused(server.wire.generate, PROMPT, adapter=ref)
    assert (refusal.code, refusal.reason) == (INVALID, "ADAPTER_NAME_INVALID"), refusal


@pytest.mark.parametrize("version", [0, -1])
def test_bad_versions(server: Server, reference, zoo, version: int) -> None:
    refusal = refused(server.wire.publish, "v", zoo.adapter("llama2", "lora"), version=version)
    assert (refusal.code, refusal.reason) == (INVALID, "ADAPTER_VERSION_INVALID"), refusal


@pytest.mark.parametrize("path", ["{roots}/../..", "/etc", "{roots}/outside", "{roots}x"])
def test_paths_outside_the_roots(server: Server, reference, path: str) -> None:
    refusal = refused(server.wire.publish_path, "p", path.format(roots=server.roots))
    assert refusal.code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.NOT_FOUND), refusal
    assert refusal.reason in ("PATH_NOT_ALLOWED", "ADAPTER_FOLDER_NOT_FOUND"), refusal


@pytest.mark.parametrize("path", ["good", "./good", "../good"])
def test_relative_paths(server: Server, reference, path: str) -> None:
    refusal = refused(server.wire.publish_path, "p", path)
    assert (refusal.code, refusal.reason) == (INVALID, "PATH_NOT_ABSOLUTE"), refusal


def test_a_path_inside_the_roots_is_served(server: Server, reference) -> None:
    assert server.wire.publish_path("fine", server.roots / "good").adapter.name == "fine"


def test_a_missing_folder_inside_the_roots(server: Server, reference) -> None:
    refusal = refused(server.wire.publish_path, "p", server.roots / "missing")
    check(refusal, "ADAPTER_FOLDER_NOT_FOUND", "missing", grpc.StatusCode.NOT_FOUND)


# --- Requests.


@dataclass(frozen=True)
class BadRequest:
    name: str
    culprit: str
    options: dict


def bad(name: str, culprit: str, **options) -> BadRequest:
    return BadRequest(name, culprit, options)


BAD_GENERATES = [
    bad("empty-prompt", "prompt_token_ids", prompt=[]),
    bad("negative-id", "prompt_token_ids", prompt=[5, -1]),
    bad("id-out-of-range", "prompt_token_ids", prompt=[5, VOCAB]),
    bad("id-int-min", "prompt_token_ids", prompt=[-(2**31)]),
    bad("prompt-fills-context", "prompt_token_ids", prompt=[5] * CONTEXT),
    bad("prompt-beyond-context", "prompt_token_ids", prompt=[5] * (10 * CONTEXT)),
    bad("n-zero", "n", n=0),
    bad("n-million", "n", n=1_000_000),
    bad("max-tokens-zero", "max_tokens", max_tokens=0),
    bad("max-tokens-2-31", "max_tokens", max_tokens=2**31),
    bad("max-tokens-2-32", "max_tokens", max_tokens=2**32 - 1),
    bad("min-above-max", "min_tokens", max_tokens=5, min_tokens=6),
    bad("negative-temperature", "temperature", temperature=-0.5),
    bad("huge-temperature", "temperature", temperature=1000.0),
    bad("nan-temperature", "temperature", temperature=float("nan")),
    bad("infinite-temperature", "temperature", temperature=float("inf")),
    bad("zero-top-k", "top_k", top_k=0),
    bad("zero-top-p", "top_p", top_p=0.0),
    bad("large-top-p", "top_p", top_p=1.5),
    bad("nan-top-p", "top_p", top_p=float("nan")),
    bad("negative-min-p", "min_p", min_p=-0.1),
    bad("large-min-p", "min_p", min_p=1.1),
    bad("stop-id-out-of-range", "stop_token_ids", stop=[VOCAB]),
    bad("too-many-stop-ids", "stop_token_ids", stop=list(range(9))),
    bad("top-logprobs", "top_k", logprobs=RAW, top_logprobs=21),
    bad("chosen-out-of-range", "chosen_token_ids", logprobs=RAW, chosen=[VOCAB]),
    bad("too-many-chosen", "chosen_token_ids", logprobs=RAW, chosen=list(range(51))),
    bad("bad-mode", "response_mode", mode=77),
    bad("bad-logprob-mode", "mode", logprobs=77),
    bad("long-request-id", "request_id", request_id="x" * 5000),
]


@pytest.mark.parametrize("case", BAD_GENERATES, ids=lambda case: case.name)
def test_bad_generates(server: Server, reference, case: BadRequest) -> None:
    options = dict(prompt=PROMPT, max_tokens=2) | case.options
    refusal = refused(server.wire.generate, **options)
    assert refusal.code == INVALID, refusal
    assert refusal.reason and refusal.domain == "dorad", refusal
    fields = [field.partition("[")[0].rpartition(".")[2] for field, *_ in refusal.violations]
    assert set(fields) == {case.culprit}, refusal
    assert case.culprit in refusal.message, refusal


def test_all_problems_of_a_request_are_listed_at_once(server: Server, reference) -> None:
    refusal = refused(server.wire.generate, [VOCAB], n=0, temperature=-1.0, top_p=2.0, max_tokens=0)
    fields = " ".join(field for field, *_ in refusal.violations)
    for word in ("prompt_token_ids", "n", "temperature", "top_p", "max_tokens"):
        assert word in fields, refusal


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_packed_ids_of_broken_length(server: Server, reference, size: int) -> None:
    request = generate_request(PROMPT, max_tokens=2)
    request.prompt_token_ids = bytes(size)
    refusal = refused(lambda: list(server.wire.inference.Generate(request, timeout=10)))
    assert refusal.code == INVALID
    assert any("prompt_token_ids" in field for field, *_ in refusal.violations)


BAD_SCORES = [
    ("no-sequences", "sequences", dict(sequences=[])),
    ("empty-sequence", "sequences", dict(sequences=[PROMPT, []])),
    ("id-out-of-range", "sequences", dict(sequences=[[1, VOCAB]])),
    ("beyond-context", "sequences", dict(sequences=[[5] * (CONTEXT + 1)])),
    ("too-many-tokens", "sequences", dict(sequences=[[5] * 100] * 30)),
    ("zero-temperature", "temperature", dict(temperature=0.0)),
    ("nan-temperature", "temperature", dict(temperature=float("nan"))),
    ("top-k", "top_k", dict(top_k=21)),
    ("chosen", "chosen_token_ids", dict(chosen=[-1])),
]


@pytest.mark.parametrize(
    "culprit, options", [case[1:] for case in BAD_SCORES], ids=[case[0] for case in BAD_SCORES]
)
def test_bad_scores(server: Server, reference, culprit: str, options: dict) -> None:
    refusal = refused(server.wire.score_response, **(dict(sequences=[PROMPT]) | options))
    assert refusal.code in (INVALID, grpc.StatusCode.RESOURCE_EXHAUSTED), refusal
    assert refusal.reason and culprit in refusal.message, refusal


def test_bad_adapter_among_good_ones_of_a_score(server: Server, reference) -> None:
    refusal = refused(server.wire.score_response, [PROMPT], ["good", "", "missing"])
    check(refusal, "ADAPTER_NOT_FOUND", "missing", grpc.StatusCode.NOT_FOUND)
    assert server.wire.info().engine.adapter_leases == 0


def test_abort_without_a_target(server: Server, reference) -> None:
    for request in (inference_pb2.AbortRequest(), inference_pb2.AbortRequest(all=False)):
        assert refused(server.wire.inference.Abort, request, timeout=10).code == INVALID


def test_bad_paging(server: Server, reference) -> None:
    for request in (
        adapters_pb2.ListRequest(page_token="garbage"),
        adapters_pb2.ListRequest(page_size=0),
        adapters_pb2.ListRequest(page_size=1_000_000),
    ):
        assert refused(server.wire.adapters.List, request, timeout=10).code == INVALID, request


def test_watch_from_the_future(server: Server, reference) -> None:
    request = adapters_pb2.WatchRequest(from_generation=10**12)
    refusal = refused(lambda: next(server.wire.adapters.Watch(request, timeout=10)))
    assert refusal.code in (INVALID, grpc.StatusCode.OUT_OF_RANGE), refusal


def test_garbage_on_the_wire(server: Server, reference) -> None:
    call = server.wire.channel.unary_unary(
        "/dorad.v1.InferenceService/Score",
        request_serializer=lambda request: request,
        response_deserializer=lambda response: response,
    )
    for message in (b"\xff" * 40, b"\x0a\xff\xff\xff\xff\x0f", bytes(1000)):
        assert refused(call, message, timeout=10).reason == "REQUEST_MALFORMED"


def test_memory_stays_flat_under_bad_input(server: Server, reference, zoo) -> None:
    folder = zoo.adapter("llama2", "dora")
    values = json.loads((folder / "adapter_config.json").read_text())
    image = (folder / WEIGHTS).read_bytes()

    def burst(count: int) -> None:
        for _ in range(count):
            refused(server.wire.publish_bytes, "bad", values | {"r": 4}, image)
            refused(server.wire.publish_bytes, "bad", values, image[:-1000])
            refused(server.wire.generate, [VOCAB])
            refused(server.wire.score_response, [PROMPT], ["missing"])

    burst(60)
    before = server.rss()
    burst(240)
    wait_until(lambda: server.wire.info().engine.adapter_leases == 0, what="no leases")
    assert server.rss() - before < 24 << 20


# --- Models and configurations: the program ends with one clear line.


def run_to_end(line: list[str]) -> tuple[int, str]:
    run = subprocess.run(line, capture_output=True, text=True, timeout=60, env=environment())
    return run.returncode, run.stdout + run.stderr


def assert_clear_failure(line: list[str], *culprits: str) -> None:
    code, said = run_to_end(line)
    assert 0 < code < 128, (code, said)
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


def test_the_table_is_large_enough() -> None:
    sizes = [
        BAD_ADAPTERS,
        BAD_CONFIG_TEXTS,
        BAD_IMAGES,
        BAD_NAMES,
        BAD_GENERATES,
        BAD_SCORES,
        BAD_MODELS,
        BAD_CONFIGS,
    ]
    assert sum(map(len, sizes)) >= 60
