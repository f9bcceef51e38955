"""Peers in PyTorch: transformers and PEFT, as a server would use them, with random weights. Caches
are filled with random keys and values instead of prefilled: a step does not care."""

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable

import torch
import transformers
from make_random_model import Shape
from peft import LoraConfig, get_peft_model
from peft.helpers import DoraCaching
from peft.tuners.lora import LoraLayer

WARM_UP, STEPS = 4, 20
PREFILLS = 5


class EagerCompose(torch.nn.Module):
    """What DoRA adds to the base's result, (g − 1)·base + g·s·lora, with a g that does not change:
    in the place of PEFT's layer, which computes the norms in every forward."""

    def __init__(self, g: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.g, self.g_less_one = g.to(dtype), (g - 1).to(dtype)

    def forward(self, x, *, lora_A, lora_B, scaling, base_layer, base_result, adapter_name):
        base = base_result if base_layer.bias is None else base_result - base_layer.bias
        return self.g_less_one * base + self.g * (scaling * lora_B(lora_A(x)))


def compose_eagerly(model: torch.nn.Module) -> None:
    for module in model.modules():
        if not isinstance(module, LoraLayer):
            continue
        weight = module.get_base_layer().weight
        for name, layer in module.lora_magnitude_vector.items():
            product = module.lora_B[name].weight.float() @ module.lora_A[name].weight.float()
            norm = torch.linalg.norm(weight.float() + module.scaling[name] * product, dim=1)
            composed = EagerCompose(layer.weight.float() / norm, weight.dtype)
            module.lora_magnitude_vector[name] = composed


@torch.inference_mode()
def build(
    peer: str, options: argparse.Namespace, dtype: torch.dtype = torch.bfloat16
) -> torch.nn.Module:
    """The same weights for the same options, whatever the peer."""
    shape = Shape.read(options.shape, options.layers)
    torch.manual_seed(0)
    with torch.device(options.device):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**shape.config),
            dtype=dtype,
            attn_implementation="sdpa",
        )
        if peer != "base":
            config = LoraConfig(
                r=options.rank,
                lora_alpha=options.rank,
                use_dora=peer != "lora",
                target_modules=sorted(shape.all_linears()),
                init_lora_weights=False,  # random, B too
            )
            model = get_peft_model(model, config, autocast_adapter_dtype=False).to(dtype)
            for name, parameter in model.named_parameters():
                if "magnitude" in name:  # g is 1 until it is trained
                    parameter.mul_(torch.empty_like(parameter).uniform_(0.9, 1.1))
    if peer == "compose":
        compose_eagerly(model)
    return model.eval()


def synchronize(options: argparse.Namespace) -> None:
    if options.device == "cuda":
        torch.cuda.synchronize()


def timed(options: argparse.Namespace, work: Callable[[], None]) -> float:
    synchronize(options)
    begin = time.perf_counter()
    work()
    synchronize(options)
    return 1e3 * (time.perf_counter() - begin)


def random_ids(options: argparse.Namespace, rows: int, tokens: int) -> torch.Tensor:
    vocabulary = Shape.read(options.shape).config["vocab_size"]
    return torch.randint(0, vocabulary, (rows, tokens), device=options.device)


def filled_cache(
    options: argparse.Namespace, rows: int, tokens: int, dtype: torch.dtype
) -> transformers.Cache:
    config = Shape.read(options.shape, options.layers).config
    cache = transformers.DynamicCache(config=transformers.AutoConfig.for_model(**config))
    size = (rows, config["num_key_value_heads"], tokens, config["head_dim"])
    for layer in range(config["num_hidden_layers"]):
        keys, values = (torch.randn(size, dtype=dtype, device=options.device) for _ in range(2))
        cache.update(keys, values, layer)
    return cache


@torch.inference_mode()
def decode(model: torch.nn.Module, options: argparse.Namespace, batch: int) -> float:
    """The median step; options.context is the mean context of those that are timed."""
    before = max(options.context - WARM_UP - STEPS // 2, 1)
    cache = filled_cache(options, batch, before, model.dtype)
    ids = random_ids(options, batch, 1)

    def step() -> None:
        nonlocal ids
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
        ids = logits[:, -1].argmax(-1, keepdim=True)

    times = [timed(options, step) for _ in range(WARM_UP + STEPS)]
    assert cache.get_seq_length() == before + WARM_UP + STEPS
    return statistics.median(times[WARM_UP:])


@torch.inference_mode()
def prefill(model: torch.nn.Module, options: argparse.Namespace) -> float:
    ids = random_ids(options, 1, options.prefill)

    def step() -> None:
        model(input_ids=ids, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)

    return statistics.median([timed(options, step) for _ in range(PREFILLS + 2)][2:])


def measure(peer: str, options: argparse.Namespace, report) -> None:
    model = build(peer, options)
    with DoraCaching() if peer == "dora-cached" else contextlib.nullcontext():
        for batch in options.batch:
            report.attempt(("decode", batch), lambda batch=batch: decode(model, options, batch))
            if options.device == "cuda":
                torch.cuda.empty_cache()
        if options.prefill:
            report.attempt(("prefill", options.prefill), lambda: prefill(model, options))
