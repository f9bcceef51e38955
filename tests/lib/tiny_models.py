"""Tiny random models of every supported family, made and saved by transformers.

Weights are scaled so that logits spread over several nats: a flat distribution would hide errors.
Every family has something that the others lack; FAMILIES is the table of those differences.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3TextConfig,
    LlamaConfig,
    Mistral3Config,
    MistralConfig,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3VLConfig,
)

VOCAB = 300
CONTEXT = 192


@dataclass(frozen=True)
class Family:
    name: str
    config: Callable[[], PretrainedConfig]
    dtype: torch.dtype = torch.float32
    # Split the weights into several safetensors files with an index.
    sharded: bool = False
    # Lengths of the sequences on which the family is compared: they begin, cross and span pages.
    lengths: tuple[int, ...] = (2, 17, 40)
    # Write config.json as transformers 4 did: rope_theta, rope_scaling and torch_dtype.
    legacy_config: bool = False
    # Keys to take out of config.json.
    absent_keys: tuple[str, ...] = ()


def _common(**changes) -> dict:
    values = dict(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    values.update(changes)
    return values


def _rope(kind: str = "default", theta: float = 10000.0, **changes) -> dict:
    return dict(rope_type=kind, rope_theta=theta, **changes)


def _llama(**changes):
    return lambda: LlamaConfig(**_common(**changes))


def _qwen2(**changes):
    return lambda: Qwen2Config(**_common(**changes))


def _qwen3(**changes):
    return lambda: Qwen3Config(**_common(**changes))


# The token of an image, and of a video; prompts of tests begin above.
IMAGE, VIDEO = 3, 4
_QWEN_IMAGES = dict(
    image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=1, vision_end_token_id=0
)


def _text(**changes) -> dict:
    values = _common(num_key_value_heads=2, **changes)
    del values["tie_word_embeddings"]  # the whole model's
    return values


def _tower(**changes) -> dict:
    return dict(hidden_size=32, intermediate_size=48, patch_size=2, **changes)


def _qwen25_vl() -> PretrainedConfig:
    return Qwen2_5_VLConfig(
        text_config=_text(rope_parameters=_rope(theta=1e6, mrope_section=[2, 3, 3])),
        vision_config=_tower(
            depth=2, num_heads=2, out_hidden_size=64, window_size=8, fullatt_block_indexes=[1]
        ),
        **_QWEN_IMAGES,
    )


def _qwen3_vl(**changes):
    return lambda: Qwen3VLConfig(
        text_config=_text(
            head_dim=24,
            max_position_embeddings=1024,  # for an image of several pieces
            rope_parameters=_rope(theta=5e6, mrope_section=[4, 4, 4], mrope_interleaved=True),
        ),
        vision_config=_tower(
            depth=2,
            num_heads=2,
            out_hidden_size=64,
            num_position_embeddings=16,
            deepstack_visual_indexes=[0],
        ),
        **_QWEN_IMAGES,
        **changes,
    )


def _mistral3(**changes):
    return lambda: Mistral3Config(
        text_config=_text(model_type="mistral", head_dim=32, sliding_window=None),
        vision_config=_tower(
            model_type="pixtral", num_hidden_layers=2, num_attention_heads=2, image_size=16
        ),
        image_token_index=IMAGE,
        **changes,
    )


def _gemma3_values(**changes) -> dict:
    return _common(
        hidden_size=96,  # its root is not a bf16 number
        num_hidden_layers=4,
        num_key_value_heads=2,
        head_dim=24,
        query_pre_attn_scalar=40,
        sliding_window=8,
        sliding_window_pattern=3,
        rope_parameters={
            "full_attention": _rope("linear", 1e6, factor=8.0),
            "sliding_attention": _rope(theta=500.0),
        },
        **changes,
    ) | {"tie_word_embeddings": True}


def _gemma3() -> PretrainedConfig:
    return Gemma3Config(
        text_config=_gemma3_values(attention_bias=True),
        vision_config=_tower(
            num_hidden_layers=2, num_attention_heads=2, image_size=16, vision_use_head=False
        ),
        mm_tokens_per_image=16,  # more than a window
        image_token_index=IMAGE,
        boi_token_index=1,
        eoi_token_index=0,
    )


_DELTA = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=16,  # as the fused linears want it
    linear_key_head_dim=16,
    linear_value_head_dim=12,
)


# Layer 1 has attention, as kinds of adapters want it.
def _qwen35_text() -> PretrainedConfig:
    values = _common(num_hidden_layers=5, num_key_value_heads=2, head_dim=24, **_DELTA)
    return Qwen3_5TextConfig(**values, full_attention_interval=2, linear_conv_kernel_dim=3)


def _qwen35() -> PretrainedConfig:
    rope = _rope(theta=1e6, mrope_section=[2, 1, 1], mrope_interleaved=True)
    linear, full = "linear_attention", "full_attention"
    return Qwen3_5Config(
        text_config=_text(
            head_dim=16,
            num_hidden_layers=4,
            layer_types=[linear, full, linear, linear],
            attention_bias=True,
            rope_parameters=rope | {"partial_rotary_factor": 0.5},
            **_DELTA,
        ),
        vision_config=_tower(depth=2, num_heads=2, out_hidden_size=64, num_position_embeddings=16),
        tie_word_embeddings=True,
        **_QWEN_IMAGES,
    )


FAMILIES = [
    Family("llama2", _llama(rope_parameters=_rope())),
    Family(
        "llama3",
        _llama(
            hidden_size=96,
            num_attention_heads=6,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            eos_token_id=[2, 5],
            rope_parameters=_rope(
                "llama3",
                500000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            ),
        ),
        dtype=torch.bfloat16,
    ),
    # Gate and up stacked end at no multiple of 16: a GPU multiplies them by library products.
    Family(
        "llama_linear",
        _llama(
            rope_parameters=_rope("linear", factor=2.5),
            intermediate_size=120,
            hidden_act="gelu_pytorch_tanh",
        ),
        legacy_config=True,
    ),
    Family(
        "llama_dynamic",
        _llama(rope_parameters=_rope("dynamic", factor=2.0), num_key_value_heads=2),
        dtype=torch.float16,
    ),
    Family(
        "llama_yarn",
        _llama(
            rope_parameters=_rope("yarn", factor=6.0, original_max_position_embeddings=32),
            num_key_value_heads=1,
        ),
        sharded=True,
    ),
    # Served up to the original context, with the short factors (docs/guides/models.md).
    Family(
        "llama_longrope",
        _llama(
            rope_parameters=_rope(
                "longrope",
                factor=3.0,
                original_max_position_embeddings=64,
                long_factor=[1.0, 1.1, 1.4, 2.0, 3.0, 4.5, 7.0, 10.0],
                short_factor=[1.0, 1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5],
            )
        ),
    ),
    Family(
        "llama_bias",
        _llama(attention_bias=True, mlp_bias=True, head_dim=24, rope_parameters=_rope()),
    ),
    Family(
        "mistral",
        lambda: MistralConfig(
            **_common(num_key_value_heads=2, sliding_window=8, rope_parameters=_rope())
        ),
        dtype=torch.float16,
    ),
    Family(
        "mistral_full",
        lambda: MistralConfig(**_common(head_dim=32, sliding_window=None)),
        legacy_config=True,
    ),
    Family("qwen2", _qwen2(num_key_value_heads=2, rope_parameters=_rope(theta=1e6))),
    Family(
        "qwen2_window",
        _qwen2(
            num_hidden_layers=4,
            num_key_value_heads=2,
            use_sliding_window=True,
            sliding_window=8,
            max_window_layers=2,
        ),
        dtype=torch.bfloat16,
        sharded=True,
    ),
    Family(
        "qwen25_tied",
        _qwen2(
            num_key_value_heads=1,
            tie_word_embeddings=True,
            rms_norm_eps=1e-6,
            rope_parameters=_rope("yarn", 1e6, factor=4.0, original_max_position_embeddings=48),
        ),
        dtype=torch.bfloat16,
    ),
    # Heads of a GPU's fast attention.
    Family("qwen3", _qwen3(head_dim=64, num_key_value_heads=2, rope_parameters=_rope(theta=1e6))),
    Family(
        "qwen3_tied",
        _qwen3(
            head_dim=24,
            num_key_value_heads=2,
            attention_bias=True,
            tie_word_embeddings=True,
            use_sliding_window=True,
            sliding_window=8,
            max_window_layers=1,
        ),
        dtype=torch.bfloat16,
    ),
    # Models of several parts: their text.
    Family("qwen25_vl", _qwen25_vl),
    Family("qwen3_vl", _qwen3_vl(tie_word_embeddings=True), dtype=torch.bfloat16),
    Family("mistral3", _mistral3(tie_word_embeddings=False), absent_keys=("tie_word_embeddings",)),
    Family("gemma3_text", lambda: Gemma3TextConfig(**_gemma3_values())),
    Family("gemma3", _gemma3, dtype=torch.bfloat16, legacy_config=True),
    Family("qwen35_text", _qwen35_text),
    Family("qwen35", _qwen35, dtype=torch.bfloat16),
]
# Long contexts and a few milliseconds a token: for tests that catch a request in its middle.
SLOW = Family(
    "slow",
    _llama(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_key_value_heads=2,
        max_position_embeddings=8192,
    ),
)
BY_NAME = {family.name: family for family in [*FAMILIES, SLOW]}


def _randomise(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Norms of Gemma and Qwen3.5 add 1 to their parameters. Gemma scales embeddings, and its tied
    # head would repeat tokens of larger ones.
    norm_mean, spread = 1.0, 1.6
    if model.config.model_type.startswith("gemma"):
        norm_mean, spread = 0.0, 1.0
    if model.config.model_type.startswith("qwen3_5"):
        norm_mean = 0.0

    def normal(tensor: torch.Tensor, std: float, mean: float = 0.0) -> None:
        tensor.copy_(mean + std * torch.randn(tensor.shape, generator=generator))

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # fast decays round much in transformers' chunks
                normal(parameter, 0.2, mean=-3.0)
            elif name.endswith("bias"):
                normal(parameter, 0.2)
            elif parameter.ndim == 1:  # of a norm
                is_plain = "vision_tower" in name or name.endswith("linear_attn.norm.weight")
                normal(parameter, 0.2, mean=1.0 if is_plain else norm_mean)
            elif "embed_tokens" in name or "lm_head" in name:
                normal(parameter, spread * parameter.shape[1] ** -0.5)
            elif (
                "linear_attn.out_proj" in name
            ):  # a gated norm enlarges what rounding did before it
                normal(parameter, 0.4 * parameter.shape[1] ** -0.5)
            else:
                normal(parameter, 0.8 * parameter.shape[1] ** -0.5)


def model_class(config: PretrainedConfig) -> type:
    """The class of models of that configuration: one with images has parts."""
    has_parts = hasattr(config, "vision_config")
    return AutoModelForImageTextToText if has_parts else AutoModelForCausalLM


def make(family: Family, directory: Path, seed: int = 0) -> Path:
    """Saves the family's model into the directory, unless it is already there."""
    if (directory / "config.json").exists():
        return directory
    config = family.config()
    model = model_class(config).from_config(config, dtype=torch.float32)
    _randomise(model, seed)
    model.to(family.dtype).save_pretrained(
        directory, max_shard_size="100KB" if family.sharded else "5GB"
    )
    if family.sharded:
        assert len(list(directory.glob("*.safetensors"))) > 1
    if family.legacy_config:
        _write_legacy_config(directory / "config.json")
    if family.absent_keys:
        path = directory / "config.json"
        config_json = json.loads(path.read_text())
        for key in family.absent_keys:
            del config_json[key]
        path.write_text(json.dumps(config_json))
    return directory


def _write_legacy_config(path: Path) -> None:
    values = json.loads(path.read_text())
    values["torch_dtype"] = values.pop("dtype")
    text = values.get("text_config", values)
    rope = text.pop("rope_parameters")
    # The oldest form names the kind "type", but Gemma's.
    kind_key = "type"
    if "sliding_attention" in rope:
        kind_key = "rope_type"
        text["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
        text["sliding_window_pattern"] = text.pop("_sliding_window_pattern")
        del text["layer_types"]
    text["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    text["rope_scaling"] = {kind_key: kind, **rope} if kind != "default" else None
    path.write_text(json.dumps(values, indent=2))


def sequences(family: Family, seed: int = 7) -> list[list[int]]:
    """Token sequences of the family's lengths; ids avoid the special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(6, VOCAB, (length,), generator=generator).tolist()
        for length in family.lengths
    ]
