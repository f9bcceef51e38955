"""Perturbed adapters, made and saved by PEFT itself.

A fresh adapter has B = 0 and m = ||W||: it equals the base model, and no error in norm, scale or
magnitude can be seen. These have random A and B of a size comparable with W, and every magnitude
is scaled by 0.7 to 1.3.
"""

import copy
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEARS = ATTENTION + ["gate_proj", "up_proj", "down_proj"]
WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True)
class Kind:
    """One row of the adapter table: keyword arguments of LoraConfig, and how it is stored."""

    name: str
    config: dict
    dtype: torch.dtype = torch.float32
    # Store magnitudes under "...lora_magnitude_vector.weight", as some PEFT versions did.
    weight_suffix: bool = False
    # PEFT adds the base embedding's weights to the file when an embedding is adapted.
    save_embeddings: bool = False
    # Also of the modules that are not text, in a model of several parts.
    all_parts: bool = False


def _dora(**changes) -> dict:
    return dict(r=8, lora_alpha=16, target_modules="all-linear", use_dora=True) | changes


def _lora(**changes) -> dict:
    return dict(r=8, lora_alpha=16, target_modules=LINEARS) | changes


KINDS = [
    Kind("dora", _dora()),
    Kind("lora", _lora()),
    Kind("rslora", _lora(r=12, lora_alpha=5, use_rslora=True)),
    Kind(
        "dora_patterns",
        _dora(
            target_modules=LINEARS,
            use_rslora=True,
            rank_pattern={"q_proj": 3, "layers.1.mlp.up_proj": 24, r".*\.0\..*\.v_proj": 5},
            alpha_pattern={"o_proj": 3, r"^model\.layers\.0\.mlp\.down_proj": 40},
        ),
    ),
    Kind("dora_r1", _dora(r=1, lora_alpha=2)),
    Kind("dora_r96", _dora(r=96, lora_alpha=96, target_modules=ATTENTION + ["down_proj"])),
    Kind("dora_layers", _dora(target_modules=LINEARS, layers_to_transform=[0, 2])),
    Kind(
        "lora_layers_pattern",
        _lora(target_modules=["v_proj"], layers_to_transform=1, layers_pattern="layers"),
    ),
    Kind("dora_exclude", _dora(exclude_modules=["k_proj", "model.layers.1.mlp.down_proj"])),
    Kind("lora_regex", _lora(target_modules=r".*\.(q_proj|v_proj|gate_proj)")),
    Kind("dora_regex_exclude", _dora(target_modules=r".*proj", exclude_modules=r".*layers\.0.*")),
    Kind("lora_embedding", _lora(target_modules=["embed_tokens"])),
    Kind("dora_embedding", _dora(target_modules=["embed_tokens", "q_proj", "up_proj"])),
    Kind("dora_head", _dora(target_modules=["lm_head", "v_proj"])),
    Kind("lora_head", _lora(target_modules=["lm_head"])),
    Kind(
        "dora_everything",
        _dora(r=6, target_modules=LINEARS + ["embed_tokens", "lm_head"], use_rslora=True),
    ),
    Kind(
        "dora_saved_embedding",
        _dora(target_modules=["embed_tokens", "o_proj"]),
        save_embeddings=True,
    ),
    Kind("dora_bf16", _dora(), dtype=torch.bfloat16),
    Kind("dora_r64", _dora(r=64, lora_alpha=64)),
    Kind("dora_fp16_suffix", _dora(), dtype=torch.float16, weight_suffix=True),
]
# Of models with a tower that is served; each has some of the modules.
TOWER_KINDS = [
    Kind("dora_tower", _dora(), all_parts=True),
    Kind(
        "rslora_tower",
        _lora(
            target_modules=["qkv", "linear_fc2", "mlp.2", "linear_2", "v_proj"],
            use_rslora=True,
            r=5,
        ),
        all_parts=True,
    ),
    # Blocks of the tower count as layers; mergers and projectors are none.
    Kind(
        "dora_tower_layers",
        _dora(
            target_modules=[
                *LINEARS,
                "qkv",
                "proj",
                "linear_fc1",
                "linear_fc2",
                "mlp.0",
                "linear_1",
                "out_proj",
            ],
            exclude_modules=["patch_embed.proj"],
            layers_to_transform=[0, 2],
        ),
        all_parts=True,
    ),
    Kind(
        "dora_tower_patterns",
        _dora(
            target_modules=[
                "proj",
                "linear_fc1",
                "mlp.0",
                "merging_layer",
                "q_proj",
                "fc2",
                "embed_tokens",
            ],
            exclude_modules=["patch_embed.proj"],
            rank_pattern={
                r"(patch_)?merger\.(linear_fc1|mlp\.0|merging_layer)": 3,
                r"(blocks\.1\.attn\.proj|transformer\.layers\.1\.attention\.q_proj)": 11,
                r"encoder\.layers\.1\.mlp\.fc2": 7,
            },
        ),
        all_parts=True,
    ),
]
BY_NAME = {kind.name: kind for kind in KINDS + TOWER_KINDS}


def perturb(model: torch.nn.Module, seed: int, delta: float = 0.8) -> None:
    """Fills every adapter tensor; the entries of s·B·A deviate by about `delta` times as much as
    those of the base weight."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: torch.Tensor, std: float) -> None:
        tensor.copy_(std * torch.randn(tensor.shape, generator=generator))

    with torch.no_grad():
        for layer in model.modules():
            if not isinstance(layer, LoraLayer):
                continue
            rank = layer.r["default"]
            size = delta * float(layer.get_base_layer().weight.float().std())
            size /= layer.scaling["default"] * rank**0.5
            if "default" in layer.lora_A:
                a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            else:
                a, b = layer.lora_embedding_A["default"], layer.lora_embedding_B["default"]
            normal(a, 0.3)
            normal(b, size / 0.3)
            if "default" in layer.lora_magnitude_vector:
                m = layer.lora_magnitude_vector["default"].weight
                m.mul_(0.7 + 0.6 * torch.rand(m.shape, generator=generator))


def _text_only(config: dict) -> dict:
    """The same without what is not text in a model of several parts."""
    excluded = config.get("exclude_modules") or []
    names = excluded if isinstance(excluded, str) else "|".join(map(re.escape, excluded))
    parts = r".*(visual|vision_tower|multi_modal_projector)\..*"
    either = rf"{parts}|{names}" if isinstance(excluded, str) else rf"{parts}|(.*\.)?({names})"
    return config | {"exclude_modules": either if names else parts}


def _found(base: torch.nn.Module, config: dict) -> dict:
    """The same without targets that the model does not have."""
    targets = config["target_modules"]
    if isinstance(targets, str):
        return config
    names = [name for name, _ in base.named_modules()]
    found = [each for each in targets if any(name.endswith(f".{each}") for name in names)]
    return config | {"target_modules": found}


def make(
    base: torch.nn.Module, kind: Kind, directory: Path, seed: int = 0, delta: float = 0.8
) -> Path:
    """Saves a perturbed adapter of that kind for the base model, unless it is already there."""
    if (directory / "adapter_config.json").exists():
        return directory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = kind.config
        if kind.all_parts:
            config = _found(base, config)
        elif hasattr(base.config, "vision_config"):
            config = _text_only(config)
        model = get_peft_model(copy.deepcopy(base), LoraConfig(task_type="CAUSAL_LM", **config))
        perturb(model, seed, delta)
        model.save_pretrained(directory, save_embedding_layers=kind.save_embeddings)
    _store(directory / WEIGHTS, kind)
    return directory


def _store(path: Path, kind: Kind) -> None:
    tensors = load_file(path)
    if kind.weight_suffix:
        tensors = {
            name + ".weight" if name.endswith("lora_magnitude_vector") else name: tensor
            for name, tensor in tensors.items()
        }
    tensors = {name: tensor.to(kind.dtype).contiguous() for name, tensor in tensors.items()}
    save_file(tensors, path, metadata={"format": "pt"})
