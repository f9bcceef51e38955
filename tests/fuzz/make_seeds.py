"""First inputs of the fuzz targets, one good one of each kind: make_seeds.py FOLDER.

Writes FOLDER/NAME/* for each NAME_fuzz, and dictionaries as FOLDER/NAME.dict. libFuzzer finds the
bad ones from there.
"""

import hashlib
import json
import struct
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "client" / "src"))

from dorad.v1 import adapters_pb2, control_pb2, inference_pb2  # noqa: E402

CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 2,
    "lora_alpha": 4,
    "use_dora": True,
    "use_rslora": False,
    "bias": "none",
    "lora_dropout": 0.0,
    "target_modules": ["q_proj"],
    "exclude_modules": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
    "layers_pattern": None,
    "modules_to_save": None,
}
PATTERNS = CONFIG | {
    "rank_pattern": {"layers.1.*q_proj": 3, "^v_proj": 1},
    "alpha_pattern": {"q_proj": 0.5},
    "layers_to_transform": [0, 2],
    "layers_pattern": "layers",
    "target_modules": "all-linear",
    "exclude_modules": r".*mlp\.(up|down)_proj",
    "use_rslora": True,
}
# Each key compiles to hundreds of thousands of instructions.
COSTLY = CONFIG | {"rank_pattern": {rf"(?:\pL){{240}}{i}": 2 for i in range(4)}}


def packed(*ids: int) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def header(tensors: dict[str, list[int]]) -> bytes:
    entries, at = {}, 0
    for name, shape in tensors.items():
        size = 4
        for extent in shape:
            size *= extent
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    return json.dumps(entries).encode()


def safetensors() -> list[bytes]:
    text = header({"a": [2, 3], "b": [4], "empty": [0, 7]})
    image = struct.pack("<Q", len(text)) + text + bytes(40)
    with_metadata = b'{"__metadata__":{"format":"pt"},"x":' + (
        b'{"dtype":"BF16","shape":[],"data_offsets":[0,2]}}  '
    )
    return [image, text, struct.pack("<Q", len(with_metadata)) + with_metadata + bytes(2)]


def config() -> list[bytes]:
    return [
        (ROOT / "deploy" / "dorad.yaml").read_bytes(),
        b"engine.kv_bytes=64MiB\nengine: {kv_bytes: 1}",
        b"adapters.preload.a=/x\nadapters:\n  preload:\n    a: /b\n",
    ]


def peft_config() -> list[bytes]:
    return [json.dumps(values).encode() for values in (CONFIG, PATTERNS, COSTLY)]


def adapter() -> list[bytes]:
    """For the base of tests/unit/support/adapter_fixture.h."""
    tensors, plain = {}, {}
    for layer in range(3):
        stem = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{stem}.lora_A.weight"] = [2, 8]
        tensors[f"{stem}.lora_B.weight"] = [8, 2]
        tensors[f"{stem}.lora_magnitude_vector"] = [8]
    stem = "base_model.model.lm_head"
    plain[f"{stem}.lora_A.weight"] = [2, 8]
    plain[f"{stem}.lora_B.weight"] = [24, 2]
    lora = CONFIG | {"use_dora": False, "target_modules": ["lm_head"]}
    return [
        json.dumps(CONFIG).encode() + b"\n" + header(tensors),
        json.dumps(lora).encode() + b"\n" + header(plain),
        json.dumps(PATTERNS).encode() + b"\n" + header(tensors),
        json.dumps(COSTLY).encode() + b"\n" + header(tensors),
    ]


def journal_text(texts: list[str]) -> bytes:
    """As server/adapter/store/journal.cc writes it."""

    def framed(text: bytes) -> bytes:
        return struct.pack("<Q", len(text)) + text

    result, check = b"", ""
    for text in texts:
        data = text.encode()
        check = hashlib.sha256(framed(check.encode()) + framed(data)).hexdigest()[:16]
        result += f"{len(data):08x} {check} ".encode() + data + b"\n"
    return result


def journal() -> list[bytes]:
    changes = [
        {"type": "started", "generation": 1, "format": 2, "base": "d" * 64},
        {"type": "started", "generation": 1, "format": 3, "base": "d" * 64, "floor": 4},
        {"type": "reserved", "generation": 1, "name": "a", "version": 1},
        {"type": "served", "generation": 1, "name": "a", "version": 1},
        {
            "type": "published",
            "generation": 2,
            "name": "a",
            "version": 1,
            "object": "ab" * 32,
            "digest": "cd" * 32,
            "create_time_ns": 1_700_000_000_000_000_000,
            "tags": {"step": "7"},
            "pinned": False,
            "activate": True,
        },
        {"type": "activated", "generation": 3, "name": "a", "version": 1},
        {"type": "retired", "generation": 4, "name": "a", "version": 1},
    ]
    texts = [json.dumps(change, separators=(",", ":")) for change in changes]
    lines = "\n".join(texts).encode()
    whole = journal_text(texts)
    return [
        b"\0" + whole,
        b"\0" + whole[:-5],
        b"\0" + whole + bytes(9),
        *[b"\1" + text.encode() for text in texts],
        b"\2\0\0\0" + lines,
        b"\2\1\7\1" + lines,
    ]


def shared_memory() -> list[bytes]:
    registration = b"DORADMEM" + struct.pack("<IIQ", 1, 0, 4096) + bytes(80)
    cuda = b"DORADMEM" + struct.pack("<IIQ", 2, 0, 4096) + bytes(range(80))
    return [b"\1" + registration, b"\0" + cuda, b"\0DORADGET" + struct.pack("<Q", 3)]


def request() -> list[bytes]:
    v1 = inference_pb2
    generate = v1.GenerateRequest(
        request_id="r",
        prompt_token_ids=packed(1, 2, 3),
        adapter="a@1",
        n=2,
        sampling=v1.SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=7),
        stop=v1.StopParams(max_tokens=8, min_tokens=2, stop_token_ids=packed(4), ignore_eos=True),
        logprobs=v1.LogprobParams(mode=1, top_k=2, chosen_token_ids=packed(5, 6)),
        response_mode=2,
        cache_salt="s",
        priority=-3,
        in_flight_policy=1,
    )
    sequence = v1.TokenSequence(token_ids=packed(1, 2, 3))
    score = v1.ScoreRequest(
        sequences=[sequence], adapters=["", "a"], top_k=2, chosen_token_ids=packed(1)
    )
    peft = adapters_pb2.PeftConfig(
        r=2,
        lora_alpha=4,
        use_dora=True,
        target_modules=adapters_pb2.ModuleSelector(list=adapters_pb2.ModuleNames(names=["q_proj"])),
        rank_pattern=[adapters_pb2.RankPattern(pattern="x", rank=1)],
    )
    tensor = adapters_pb2.MemoryTensor(name="a", dtype=1, shape=[2, 3], offset=64)
    memory = adapters_pb2.PublishFromMemoryRequest(name="a", peft_config=peft, tensors=[tensor])
    path = adapters_pb2.PublishFromPathRequest(name="a", version=3, path="/x", tags={"k": "v"})
    begin = adapters_pb2.PublishBegin(
        name="a",
        adapter_config_json="{}",
        safetensors_size=4,
        safetensors_sha256=hashlib.sha256(b"data").digest(),
        upload_id="u",
    )
    typed = adapters_pb2.PublishBegin(name="b", peft_config=peft, safetensors_size=4)
    uploads = []
    for first in (begin, typed):
        parts = [
            adapters_pb2.PublishRequest(begin=first),
            adapters_pb2.PublishRequest(chunk=adapters_pb2.PublishChunk(data=b"da")),
            adapters_pb2.PublishRequest(chunk=adapters_pb2.PublishChunk(offset=2, data=b"ta")),
            adapters_pb2.PublishRequest(commit=adapters_pb2.PublishCommit()),
        ]
        data = [part.SerializeToString() for part in parts]
        uploads.append(b"".join(struct.pack(">H", len(part)) + part for part in data))
    ttl = {"seconds": 5}
    messages = [
        (0, generate),
        (1, score),
        (2, v1.AbortRequest(requests=v1.RequestIds(request_ids=["r"]))),
        (2, v1.AbortRequest(all=True)),
        (3, control_pb2.PauseRequest(mode=1, adapter="a@2")),
        (4, control_pb2.LimitGpuShareRequest(limit_id="y", gpu_share=0.3, time_to_live=ttl)),
        (5, control_pb2.EndGpuShareLimitRequest(limit_id="y")),
        (6, adapters_pb2.ListRequest(name="a", page_token="MS9hL2EvMQ==")),
        (7, adapters_pb2.GetRequest(adapter="name@12")),
        (8, path),
        (9, memory),
    ]
    seeds = [bytes([kind]) + message.SerializeToString() for kind, message in messages]
    return seeds + [b"\x0a" + upload for upload in uploads]


JSON_WORDS = ['{"', '":', '":"', "null", "true", "false", "[]", "{}", "1e999", "-1", "\\\\u0000"]
WORDS = {
    "safetensors": [*JSON_WORDS, "F32", "BF16", "dtype", "shape", "data_offsets", "__metadata__"],
    "config": ["server:", "engine:", "kv_bytes: ", "MiB", "&a ", "*a", "!!binary", "<<: ", "- "],
    "peft_config": [*JSON_WORDS, *CONFIG, "all-linear", "LORA", "none"],
    "adapter": [*JSON_WORDS, *CONFIG, "lora_A", "lora_B", "lora_magnitude_vector", "q_proj"],
    "journal": [*JSON_WORDS, "started", "published", "generation", "create_time_ns", "\\x0a"],
    "shared_memory": ["DORADMEM", "DORADGET"],
    "request": ["a@1", "@", "all-linear"],
}
SEEDS = {
    "safetensors": safetensors,
    "config": config,
    "peft_config": peft_config,
    "adapter": adapter,
    "journal": journal,
    "shared_memory": shared_memory,
    "request": request,
}


def main() -> None:
    base = Path(sys.argv[1])
    for name, make in SEEDS.items():
        folder = base / name
        folder.mkdir(parents=True, exist_ok=True)
        for index, data in enumerate(make()):
            (folder / f"seed{index}").write_bytes(data)
        lines = [
            word if "\\" in word else word.replace('"', '\\"')
            for word in dict.fromkeys(WORDS[name])
        ]
        (base / f"{name}.dict").write_text("".join(f'"{line}"\n' for line in lines))


if __name__ == "__main__":
    main()
