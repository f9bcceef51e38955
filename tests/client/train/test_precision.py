"""Random layers in random formats against a dense reference in fp64: no further from it than PEFT.

Each case is one layer with one adapter, drawn from a seed: kind and sizes, dtypes of base and
adapter, autocast, rank, scaling, biases, frozen parts, how far the adapter is trained, whether it
nearly cancels some rows of W, and how near g is to 1. The reference is the definition,
y = (m / ‖W + s·B·A‖)·(W + s·B·A)·x + bias with a detached norm, and its gradients, of the same
rounded parameters.
"""

import contextlib
import dataclasses
import math
import random

import pytest
import torch
import torch.nn.functional as F
from dorad.train import patch, tier
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
TIERS = ["auto", "fused", "eager"]

HALVES = [torch.bfloat16, torch.float16]


@dataclasses.dataclass
class Case:
    model: nn.Module
    layer: nn.Module  # PEFT's, around the base layer
    x: torch.Tensor
    grad: torch.Tensor  # of the output
    autocast: torch.dtype | None
    what: str


def draw(seed: int, device: str) -> Case:
    pick = random.Random(seed)
    made = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=made)

    kind = pick.choice(["linear"] * 6 + ["transposed", "embedding", "conv1d", "conv2d"])
    dtype = pick.choice([torch.float64, torch.float32, *HALVES, torch.bfloat16])
    autocast = None
    if kind == "linear" and dtype in (torch.float32, torch.bfloat16) and pick.random() < 0.4:
        autocast = torch.bfloat16
    wide = dtype not in HALVES or autocast is not None or pick.random() < 0.5
    if kind.startswith("conv") and dtype in HALVES:
        wide = False  # PEFT adds fp32 to halves there.
    width, out = (8 * pick.randint(1, 40) for _ in range(2))
    rows, bias = pick.choice([1, 7, 64, 300]), pick.random() < 0.5
    torch.manual_seed(seed)
    if kind == "linear":
        base, x = nn.Linear(width, out, bias=bias), normal(2, rows, width)
    elif kind == "transposed":
        base, x = Conv1D(out, width), normal(2, rows, width)
    elif kind == "embedding":
        base, x = nn.Embedding(width, out), torch.randint(0, width, (2, rows), generator=made)
    elif kind == "conv1d":
        base, x = nn.Conv1d(width, out, 3, bias=bias, padding=1), normal(2, width, 9)
    else:
        base, x = nn.Conv2d(width, out, 3, bias=bias, stride=2), normal(2, width, 7, 7)
    rank = pick.choice([1, 3, 8, 32])
    config = LoraConfig(
        r=rank,
        lora_alpha=pick.choice([1, rank, 4 * rank, -rank]),
        use_rslora=pick.random() < 0.3,
        lora_dropout=pick.choice([0.0, 0.1]),  # without effect: the model is in eval mode
        target_modules=["0"],
        use_dora=True,
    )
    model = get_peft_model(nn.Sequential(base).to(dtype), config, autocast_adapter_dtype=wide)
    model = model.to(device).eval()
    layer = model.base_model.model[0]
    spread = pick.choice([1e-3, 0.05, 0.5])  # how far the adapter is trained
    near = pick.choice([0.0015, 0.3])  # how far g is from 1
    with torch.no_grad():
        factors = [p for n, p in model.named_parameters() if "lora_" in n and "magnitude" not in n]
        for factor in factors:
            factor.add_(spread * factor.shape[0] ** -0.5 * normal(*factor.shape).to(factor))
        # Of W in every third row. The products of halves have no digits of a thousandth.
        left = pick.choice([None] * 5 + [1e-1, 1e-1 if dtype in HALVES or autocast else 1e-3])
        if left is not None:
            for factor in factors:  # With rows of usual norms: tiny ones are clamped to epsilon.
                size = 0.5 + torch.rand(factor.shape, generator=made)
                factor.copy_(size.to(factor) * factor.sign())
            sums, output, _ = merged(layer)
            rest = (layer.base_layer.weight - sums) / (1 - left)
            third = (slice(None),) * output + (slice(None, None, 3),)
            layer.base_layer.weight[third] = rest[third].to(dtype)
        magnitude = layer.lora_magnitude_vector["default"].weight
        norm = norms(layer).view(magnitude.shape)
        magnitude.copy_(norm * (1 + near * normal(*magnitude.shape).to(norm)))
        for parameter in (*factors, magnitude):
            parameter.requires_grad_(pick.random() < 0.85)
        magnitude.requires_grad_()
    if kind != "embedding":
        x = x.to(device, dtype).requires_grad_(pick.random() < 0.8)
    x = x.to(device) if kind == "embedding" else x
    with torch.no_grad():
        shape = model(x).shape if autocast is None else (2, rows, out)
    grad = normal(*shape).to(device)
    what = f"{kind} {dtype} autocast {autocast} wide {wide} rank {rank} spread {spread} g {near}"
    what += f" left {left}"
    return Case(model, layer, x, grad, autocast, what)


def merged(layer):
    """W + s·B·A in fp64, its output dimension, and the leaves it is made of."""
    base = layer.base_layer
    weight = base.weight.detach().double()
    if isinstance(base, nn.Embedding):
        a, b = layer.lora_embedding_A["default"], layer.lora_embedding_B["default"]
    else:
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    leaves = [
        p.detach().double().requires_grad_(p.requires_grad)
        for p in (a, b, layer.lora_magnitude_vector["default"].weight)
    ]
    delta = layer.scaling["default"] * leaves[1].flatten(1) @ leaves[0].flatten(1)
    transposed = isinstance(base, nn.Embedding | Conv1D)
    sums = weight + (delta.T if transposed else delta.view(weight.shape))
    return sums, int(transposed), leaves


def norms(layer):
    sums, output, _ = merged(layer)
    dims = [dim for dim in range(sums.dim()) if dim != output]
    return torch.linalg.vector_norm(sums.detach(), dim=dims, keepdim=True)


def exact(case: Case) -> dict[str, torch.Tensor]:
    layer, base = case.layer, case.layer.base_layer
    sums, _, (a, b, magnitude) = merged(layer)
    norm = norms(layer)
    weight = sums * (magnitude.view(norm.shape) / norm)
    x = case.x.detach()
    if isinstance(base, nn.Embedding):
        y = F.embedding(x, weight)
    else:
        x = x.double().requires_grad_(case.x.requires_grad)
        bias = None if base.bias is None else base.bias.detach().double()
        if isinstance(base, nn.Conv1d | nn.Conv2d):
            y = base._conv_forward(x, weight, bias)
        else:
            y = F.linear(x, weight.T if isinstance(base, Conv1D) else weight, bias)
    y.backward(case.grad.to(y))
    leaves = {"a": a, "b": b, "magnitude": magnitude, "x": x}
    return {"y": y.detach()} | {k: leaf.grad for k, leaf in leaves.items() if leaf.grad is not None}


def computed(case: Case) -> dict[str, torch.Tensor]:
    layer = case.layer
    case.model.zero_grad()
    case.x.grad = None
    context = contextlib.nullcontext()
    if case.autocast is not None:
        context = torch.autocast(case.x.device.type, case.autocast)
    with context:
        y = case.model(case.x)
    y.backward(case.grad.to(y))
    if isinstance(layer.base_layer, nn.Embedding):
        a, b = layer.lora_embedding_A["default"], layer.lora_embedding_B["default"]
    else:
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    leaves = {"a": a, "b": b, "x": case.x}
    leaves["magnitude"] = layer.lora_magnitude_vector["default"].weight
    return {"y": y.detach()} | {k: leaf.grad for k, leaf in leaves.items() if leaf.grad is not None}


def errors(got, wanted):
    assert got.keys() == wanted.keys()
    return {
        key: float((got[key].double() - wanted[key]).norm() / wanted[key].norm()) for key in got
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", TIERS)
@pytest.mark.parametrize("count", [30, pytest.param(200, marks=pytest.mark.deep)])
def test_no_layer_is_further_from_the_definition_than_pefts(count, name, device):
    """Each result within a factor for one draw's noise, and on average not at all."""
    far, ratios = [], {}
    for seed in range(count):
        case = draw(seed, device)
        wanted = exact(case)
        results = computed(case)
        theirs = errors(results, wanted)
        dtypes = {key: result.dtype for key, result in results.items()}
        patch(case.model)
        with tier(name):
            results = computed(case)
        assert dtypes == {key: result.dtype for key, result in results.items()}
        for key, error in errors(results, wanted).items():
            last_place = torch.finfo(dtypes[key]).eps
            noise = last_place * (0.1 if dtypes[key] in HALVES else 4)
            if dtypes[key] == torch.float64:  # The reference itself is not more exact.
                noise = 1e-11
            if not error <= 2 * theirs[key] + noise:
                far.append(f"{seed}: {key} {error:.2e}, PEFT's {theirs[key]:.2e}: {case.what}")
            ratio = (error + noise) / (theirs[key] + noise)
            ratios.setdefault((dtypes[key], key), []).append(ratio)
    assert not far, "\n".join(far)
    means = {key: math.exp(sum(map(math.log, each)) / len(each)) for key, each in ratios.items()}
    assert max(means.values()) < 1.15, means
    assert len({dtype for dtype, _ in means}) == 4, "not every dtype was drawn"
