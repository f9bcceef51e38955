"""Writes a Hugging Face folder of a named shape with random weights, or an adapter for it, as fast
as the disk takes them: for benchmarks on a machine that has no model.

    python tools/make_random_model.py --shape qwen3-8b --out /dev/shm/model
    python tools/make_random_model.py --shape qwen3-8b --adapter --rank 384 --out /dev/shm/adapter

The shapes are those of model_shapes.json; tests/bench/model_shapes.h says more about them. Matrices
are uniform in ±0.035 (standard deviation 0.02), norms multiply by 1, biases are 0. Every tensor is
another stretch of one pool of random numbers. The adapter is DoRA on the seven linears of every
layer, with A and B such that s·B·A is about half of W, and magnitudes near the norms, so that g is
near 1.
"""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

STD = 0.02
POOL_ELEMENTS = (1 << 25) - 39  # odd, so that stretches differ in alignment too
SHARD_BYTES = 2 << 30


@dataclass(frozen=True)
class Shape:
    config: dict[str, Any]  # a config.json of the text part
    tower: dict[str, Any] | None = None  # the other parts of the whole model's

    @classmethod
    def read(cls, name: str, layers: int = 0, tower: bool = False) -> "Shape":
        """The table's shape of that name; layers: 0 for as many as it has."""
        config = dict(TABLE[name], torch_dtype="bfloat16", eos_token_id=2)
        parts = config.pop("tower", None)
        if tower and parts is None:
            raise ValueError(f"{name} has no tower")
        if "hidden_activation" not in config:
            config["hidden_act"] = "silu"
        count = config["num_hidden_layers"] = layers or config["num_hidden_layers"]
        if "layer_types" in config:  # repeated until every layer has one
            config["layer_types"] = list(islice(cycle(config["layer_types"]), count))
        return cls(config, parts if tower else None)

    @property
    def body(self) -> str:
        """The beginning of the decoder's names."""
        return "model." if self.tower is None else "model.language_model."

    def whole(self) -> dict[str, Any]:
        """A config.json with the tower, if there is one."""
        if self.tower is None:
            return self.config
        changes = self.tower["text_config"]
        text = {key: value for key, value in self.config.items() if key not in changes}
        text |= {key: value for key, value in changes.items() if value is not None}
        common = {"text_config": text, "torch_dtype": "bfloat16", "eos_token_id": 2}
        return self.tower | common

    def is_delta(self, layer: int) -> bool:
        types = self.config.get("layer_types")
        return types is not None and bool(types[layer] == "linear_attention")

    def delta_sizes(self) -> tuple[int, int]:
        """Of a delta-net's queries, keys and values together, and of its values."""
        c = self.config
        keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
        values = c["linear_num_value_heads"] * c["linear_value_head_dim"]
        return 2 * keys + values, values

    def linears(self, layer: int) -> dict[str, tuple[int, int]]:
        """[rows, cols] by the name within the layer."""
        c = self.config
        hidden, inner = c["hidden_size"], c["intermediate_size"]
        if self.is_delta(layer):
            mixed, values = self.delta_sizes()
            heads = c["linear_num_value_heads"]
            mixer = {
                "linear_attn.in_proj_qkv": (mixed, hidden),
                "linear_attn.in_proj_z": (values, hidden),
                "linear_attn.in_proj_b": (heads, hidden),
                "linear_attn.in_proj_a": (heads, hidden),
                "linear_attn.out_proj": (hidden, values),
            }
        else:
            q = c["num_attention_heads"] * c["head_dim"]
            kv = c["num_key_value_heads"] * c["head_dim"]
            has_gate = c["model_type"] == "qwen3_5_text"
            mixer = {
                "self_attn.q_proj": (2 * q if has_gate else q, hidden),
                "self_attn.k_proj": (kv, hidden),
                "self_attn.v_proj": (kv, hidden),
                "self_attn.o_proj": (hidden, q),
            }
        return mixer | {
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }

    def all_linears(self) -> set[str]:
        """Their last names, for target_modules."""
        layers = range(self.config["num_hidden_layers"])
        return {name.split(".")[1] for i in layers for name in self.linears(i)}


TABLE: dict[str, Any] = json.loads(Path(__file__).with_name("model_shapes.json").read_text())
SHAPES = {name: Shape.read(name) for name in TABLE}


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    std: float = 0.0  # of random elements
    value: float = 0.0  # of constant ones

    @property
    def elements(self) -> int:
        return int(np.prod(self.shape))


def model_tensors(shape: Shape) -> list[Tensor]:
    c = shape.config
    hidden = c["hidden_size"]
    is_gemma = c["model_type"] == "gemma3_text"
    is_qwen35 = c["model_type"] == "qwen3_5_text"
    norm = 0.0 if is_gemma or is_qwen35 else 1.0  # these add 1
    norms = ["input_layernorm", "post_attention_layernorm"]
    if is_gemma:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    embedding = (c["vocab_size"], hidden)
    tensors = [Tensor(f"{shape.body}embed_tokens.weight", embedding, STD)]
    for i in range(c["num_hidden_layers"]):
        prefix = f"{shape.body}layers.{i}."
        for name, size in shape.linears(i).items():
            tensors.append(Tensor(f"{prefix}{name}.weight", size, STD))
            if c["model_type"] == "qwen2" and name.endswith(("q_proj", "k_proj", "v_proj")):
                tensors.append(Tensor(f"{prefix}{name}.bias", size[:1]))
        for name in norms:
            tensors.append(Tensor(f"{prefix}{name}.weight", (hidden,), value=norm))
        if shape.is_delta(i):
            tensors += delta_tensors(shape, f"{prefix}linear_attn.")
        elif c["model_type"] in ("qwen3", "qwen3_5_text", "gemma3_text"):
            for name in ("self_attn.q_norm", "self_attn.k_norm"):
                tensors.append(Tensor(f"{prefix}{name}.weight", (c["head_dim"],), value=norm))
    tensors.append(Tensor(f"{shape.body}norm.weight", (hidden,), value=norm))
    if not c["tie_word_embeddings"]:
        tensors.append(Tensor("lm_head.weight", embedding, STD))
    if shape.tower is not None:
        tensors += tower_tensors(shape)
    return tensors


def delta_tensors(shape: Shape, prefix: str) -> list[Tensor]:
    """Those of a delta-net that are no linears."""
    c = shape.config
    heads = (c["linear_num_value_heads"],)
    convolution = (shape.delta_sizes()[0], 1, c["linear_conv_kernel_dim"])
    return [
        Tensor(f"{prefix}conv1d.weight", convolution, 0.3),
        Tensor(f"{prefix}A_log", heads, value=-3.0),
        Tensor(f"{prefix}dt_bias", heads),
        Tensor(f"{prefix}norm.weight", (c["linear_value_head_dim"],), value=1.0),
    ]


class Parts:
    """The tensors of a model's other parts, as they are made."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def add(self, name: str, *shape: int, std: float = 0.0, value: float = 0.0) -> None:
        self.tensors.append(Tensor(f"model.{name}", shape, std, value))

    def linear(self, name: str, *shape: int, bias: bool = True) -> None:
        self.add(f"{name}.weight", *shape, std=STD)
        if bias:
            self.add(f"{name}.bias", shape[0])

    def norm(self, name: str, size: int, *, bias: bool = True) -> None:
        self.add(f"{name}.weight", size, value=1.0)
        if bias:
            self.add(f"{name}.bias", size)


def tower_tensors(shape: Shape) -> list[Tensor]:
    """Of the tower and what joins it with the decoder."""
    assert shape.tower is not None
    parts = Parts()
    make = {
        "gemma3": _gemma,
        "mistral3": _mistral,
        "qwen2_5_vl": _qwen25,
        "qwen3_5": _qwen3,
        "qwen3_vl": _qwen3,
    }
    make[shape.tower["model_type"]](parts, shape.whole())
    return parts.tensors


def _qwen_patches(parts: Parts, c: dict[str, Any], *, bias: bool) -> None:
    sizes = (c["hidden_size"], 3, c["temporal_patch_size"], c["patch_size"], c["patch_size"])
    parts.linear("visual.patch_embed.proj", *sizes, bias=bias)


def _qwen3(parts: Parts, config: dict[str, Any]) -> None:
    c = config["vision_config"]
    width, merged = c["hidden_size"], c["hidden_size"] * c["spatial_merge_size"] ** 2
    parts.add("visual.pos_embed.weight", c["num_position_embeddings"], width, std=STD)
    _qwen_patches(parts, c, bias=True)
    for i in range(c["depth"]):
        block = f"visual.blocks.{i}."
        parts.norm(f"{block}norm1", width)
        parts.norm(f"{block}norm2", width)
        parts.linear(f"{block}attn.qkv", 3 * width, width)
        parts.linear(f"{block}attn.proj", width, width)
        parts.linear(f"{block}mlp.linear_fc1", c["intermediate_size"], width)
        parts.linear(f"{block}mlp.linear_fc2", width, c["intermediate_size"])
    mergers = [
        f"deepstack_merger_list.{i}" for i in range(len(c.get("deepstack_visual_indexes", [])))
    ]
    for merger in ["merger", *mergers]:
        parts.norm(f"visual.{merger}.norm", width if merger == "merger" else merged)
        parts.linear(f"visual.{merger}.linear_fc1", merged, merged)
        parts.linear(f"visual.{merger}.linear_fc2", c["out_hidden_size"], merged)


def _qwen25(parts: Parts, config: dict[str, Any]) -> None:
    c = config["vision_config"]
    width, merged = c["hidden_size"], c["hidden_size"] * c["spatial_merge_size"] ** 2
    _qwen_patches(parts, c, bias=False)
    for i in range(c["depth"]):
        block = f"visual.blocks.{i}."
        parts.norm(f"{block}norm1", width, bias=False)
        parts.norm(f"{block}norm2", width, bias=False)
        parts.linear(f"{block}attn.qkv", 3 * width, width)
        parts.linear(f"{block}attn.proj", width, width)
        parts.linear(f"{block}mlp.gate_proj", c["intermediate_size"], width)
        parts.linear(f"{block}mlp.up_proj", c["intermediate_size"], width)
        parts.linear(f"{block}mlp.down_proj", width, c["intermediate_size"])
    parts.norm("visual.merger.ln_q", width, bias=False)
    parts.linear("visual.merger.mlp.0", merged, merged)
    parts.linear("visual.merger.mlp.2", c["out_hidden_size"], merged)


def _mistral(parts: Parts, config: dict[str, Any]) -> None:
    c, hidden = config["vision_config"], config["text_config"]["hidden_size"]
    width, side = c["hidden_size"], c["patch_size"]
    parts.linear("vision_tower.patch_conv", width, 3, side, side, bias=False)
    parts.norm("vision_tower.ln_pre", width, bias=False)
    for i in range(c["num_hidden_layers"]):
        block = f"vision_tower.transformer.layers.{i}."
        parts.norm(f"{block}attention_norm", width, bias=False)
        parts.norm(f"{block}ffn_norm", width, bias=False)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            parts.linear(f"{block}attention.{name}", width, width, bias=False)
        for name in ("gate_proj", "up_proj"):
            parts.linear(f"{block}feed_forward.{name}", c["intermediate_size"], width, bias=False)
        parts.linear(f"{block}feed_forward.down_proj", width, c["intermediate_size"], bias=False)
    merged, bias = width * config["spatial_merge_size"] ** 2, config["multimodal_projector_bias"]
    parts.norm("multi_modal_projector.norm", width, bias=False)
    parts.linear("multi_modal_projector.patch_merger.merging_layer", width, merged, bias=False)
    parts.linear("multi_modal_projector.linear_1", hidden, width, bias=bias)
    parts.linear("multi_modal_projector.linear_2", hidden, hidden, bias=bias)


def _gemma(parts: Parts, config: dict[str, Any]) -> None:
    c, hidden = config["vision_config"], config["text_config"]["hidden_size"]
    width, side = c["hidden_size"], c["patch_size"]
    tower = "vision_tower."
    parts.linear(f"{tower}embeddings.patch_embedding", width, 3, side, side)
    positions = (c["image_size"] // side) ** 2
    parts.add(f"{tower}embeddings.position_embedding.weight", positions, width, std=STD)
    for i in range(c["num_hidden_layers"]):
        block = f"{tower}encoder.layers.{i}."
        parts.norm(f"{block}layer_norm1", width)
        parts.norm(f"{block}layer_norm2", width)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            parts.linear(f"{block}self_attn.{name}", width, width)
        parts.linear(f"{block}mlp.fc1", c["intermediate_size"], width)
        parts.linear(f"{block}mlp.fc2", width, c["intermediate_size"])
    parts.norm(f"{tower}post_layernorm", width)
    parts.add("multi_modal_projector.mm_input_projection_weight", width, hidden, std=STD)
    parts.add("multi_modal_projector.mm_soft_emb_norm.weight", width)  # It adds 1.


def adapter_tensors(shape: Shape, rank: int, dora: bool) -> list[Tensor]:
    tensors = []
    for i in range(shape.config["num_hidden_layers"]):
        for name, (rows, cols) in shape.linears(i).items():
            prefix = f"base_model.model.{shape.body}layers.{i}.{name}."
            tensors.append(Tensor(prefix + "lora_A.weight", (rank, cols), STD))
            std_b = 0.5 / rank**0.5
            tensors.append(Tensor(prefix + "lora_B.weight", (rows, rank), std_b))
            if dora:
                norm = STD * (1.25 * cols) ** 0.5
                tensors.append(Tensor(prefix + "lora_magnitude_vector", (rows,), value=norm))
    return tensors


def adapter_config(shape: Shape, rank: int, dora: bool) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "use_dora": dora,
        "bias": "none",
        "target_modules": sorted(shape.all_linears()),
    }


def to_bf16(values: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    """Cut off: which way random numbers are rounded does not matter."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


class Pool:
    """Stretches of bf16 numbers, uniform with given standard deviations."""

    def __init__(self, seed: int, stds: set[float]) -> None:
        uniform = np.random.default_rng(seed).random(POOL_ELEMENTS, dtype=np.float32) * 2 - 1
        self._scaled = {std: to_bf16(uniform * (std * 3**0.5)) for std in stds}

    def write(self, file: BinaryIO, tensor: Tensor, offset: int) -> None:
        if not tensor.std:
            file.write(to_bf16(np.full(tensor.elements, tensor.value)).tobytes())
            return
        pool, left, at = self._scaled[tensor.std], tensor.elements, offset % POOL_ELEMENTS
        while left:
            count = min(left, POOL_ELEMENTS - at)
            file.write(pool[at : at + count].data)
            left, at = left - count, 0


def write_safetensors(path: Path, tensors: list[Tensor], pool: Pool, first: int) -> None:
    header: dict[str, Any] = {}
    end = 0
    for tensor in tensors:
        begin, end = end, end + 2 * tensor.elements
        header[tensor.name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for i, tensor in enumerate(tensors):
            pool.write(file, tensor, (first + i) * 7919 * 4099)


def shards_of(tensors: list[Tensor]) -> list[list[Tensor]]:
    shards: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + 2 * tensor.elements > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += 2 * tensor.elements
    return shards


def write_model(shape: Shape, out: Path, seed: int = 0) -> None:
    shards = shards_of(model_tensors(shape))
    if len(shards) == 1:
        write_shards(out, {"model.safetensors": shards[0]}, seed)
    else:
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        write_shards(out, dict(zip(names, shards, strict=True)), seed)
        index = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
        total = sum(2 * t.elements for shard in shards for t in shard)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index})
        (out / "model.safetensors.index.json").write_text(text)
    (out / "config.json").write_text(json.dumps(shape.whole(), indent=2))


def write_adapter(shape: Shape, rank: int, out: Path, seed: int = 0, dora: bool = True) -> None:
    write_shards(out, {"adapter_model.safetensors": adapter_tensors(shape, rank, dora)}, seed + 1)
    (out / "adapter_config.json").write_text(
        json.dumps(adapter_config(shape, rank, dora), indent=2)
    )


def write_shards(out: Path, shards: dict[str, list[Tensor]], seed: int) -> None:
    """Files by name, several at once."""
    out.mkdir(parents=True, exist_ok=True)
    pool = Pool(seed, {t.std for tensors in shards.values() for t in tensors if t.std})
    first = 0
    with ThreadPoolExecutor(8) as threads:
        written = []
        for name, tensors in shards.items():
            written.append(threads.submit(write_safetensors, out / name, tensors, pool, first))
            first += len(tensors)
        for one in written:
            one.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=0, help="so many of its layers (all)")
    parser.add_argument("--tower", action="store_true", help="with the model's vision tower")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--adapter", action="store_true", help="an adapter instead of the model")
    parser.add_argument("--rank", type=int, default=384)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shape = Shape.read(args.shape, args.layers, args.tower)
    if args.adapter:
        write_adapter(shape, args.rank, args.out, args.seed)
    else:
        write_model(shape, args.out, args.seed)


if __name__ == "__main__":
    main()
