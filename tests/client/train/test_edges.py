"""The edges of a number format: g near 1, products at fp16's limit, rows that nearly cancel."""

import copy

import pytest
import torch
from dorad.train import compose, patch, tier
from lib.dora_training import Convolutions, Embeddings, adapted, inputs, step
from peft import LoraConfig, get_peft_model
from torch import nn

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]
TIERS = ["fused", "eager"]


def linear(width, out, dtype, device, *, wide_adapters=False):
    """A PEFT model of one linear, and its layer; adapters in fp32 or the base's dtype."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(width, out, bias=False)).to(dtype)
    config = LoraConfig(r=8, lora_alpha=8, target_modules=["0"], use_dora=True)
    model = get_peft_model(base, config, autocast_adapter_dtype=wide_adapters).to(device)
    return model, model.base_model.model[0]


def parts(layer):
    """W, A, B and m."""
    return (
        layer.base_layer.weight,
        layer.lora_A["default"].weight,
        layer.lora_B["default"].weight,
        layer.lora_magnitude_vector["default"].weight,
    )


# --- g near 1 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", TIERS)
@pytest.mark.parametrize("std", [0.05, 1e-4], ids=["trained", "early"])
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, False)],
)
def test_a_magnitude_near_the_norm_has_its_effect(dtype, autocast, std, name, device):
    """The paper's case: g is 1 to within 0.0015, below half the last place of bf16.

    The effective g of an output is its share in the exact W·x + s·B·A·x over many rows. An output
    that is rounded before it is scaled is rounded to itself again, whatever g is.
    """
    model, layer = linear(256, 256, dtype, device, wide_adapters=autocast)
    made = torch.Generator().manual_seed(1)
    with torch.no_grad():
        weight, a, b, _ = parts(layer)
        b.copy_(std * torch.randn(b.shape, generator=made))
        merged = weight.double() + b.double() @ a.double()
        norm = merged.norm(dim=1)
        wanted = norm * (1 + 0.0015 * torch.randn(256, generator=made).to(norm))
        dora = layer.lora_magnitude_vector["default"]
        dora.weight = nn.Parameter(wanted.float())  # In bf16 it could not be near the norm.
        g = dora.weight.double() / norm
        x = torch.randn(4096, 256, generator=made).to(device, dtype)
        inner = x.double() @ merged.T

        def errors():
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                y = model(x).double()
            effective = (y * inner).sum(0) / inner.square().sum(0)
            return float((effective - g).square().mean().sqrt()), float((y - g * inner).norm())

        theirs = errors()
        patch(model)
        with tier(name):
            ours = errors()
    assert ours[0] <= 1.2 * theirs[0]
    assert ours[1] <= 1.1 * theirs[1]
    if name == "fused":
        assert ours[0] < 2e-4, "the magnitude's effect is 1.5e-3"


# --- fp16's limit ---------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", TIERS)
def test_sums_beyond_fp16_of_products_within_it(name, device):
    """W·x = B·A·x = 40000 and m / ‖W + B·A‖ = 0.5: their sum is beyond fp16, the output is not."""
    model, layer = linear(8, 8, torch.float16, device)
    with torch.no_grad():
        weight, a, b, magnitude = parts(layer)
        weight.copy_(400 * torch.eye(8))
        a.zero_()[0, 0] = 20
        b.zero_()[0, 0] = 20
        magnitude.fill_(400)
    x = torch.ones(3, 8, dtype=torch.float16, device=device)
    x[:, 0] = 100
    grad = torch.full((3, 8), 0.01, dtype=torch.float16, device=device)
    truth = copy.deepcopy(model).double()
    wanted = truth(x.double())
    wanted.backward(grad.double())
    patch(model)
    with tier(name):
        y = model(x)
        y.backward(grad)
    assert abs(y[0, 0] - 40000) <= 32, "the last place"
    torch.testing.assert_close(y.double(), wanted, rtol=2e-3, atol=1e-2)
    for ours, theirs in zip(parts(layer)[1:], parts(truth.base_model.model[0])[1:], strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=4e-3, atol=1e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", TIERS)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_compose_keeps_what_it_needs_in_fp16(compiled, name, device):
    base, lora = (torch.full((3, 4), 40000.0, dtype=torch.float16, device=device) for _ in "12")
    g = torch.full((4,), 0.5, device=device, requires_grad=True)
    function = torch.compile(compose, backend="aot_eager") if compiled else compose
    with tier(name):
        delta = function(base, lora, g, 1.0)
        delta.sum(dtype=torch.float32).backward()
    torch.testing.assert_close(g.grad, torch.full((4,), 3 * 80000.0, device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", TIERS)
def test_a_scaled_low_rank_input_beyond_fp16(name, device):
    """s·A·x is beyond fp16, and A·x and s·B·A·x are not."""
    model, layer = linear(8, 8, torch.float16, device)
    layer.scaling["default"] = 64.0
    with torch.no_grad():
        weight, a, b, magnitude = parts(layer)
        weight.copy_(torch.eye(8))
        a.zero_()[0, 0] = 20
        b.zero_()[0, 0] = 2**-6
        magnitude.copy_((weight + 64 * b @ a).norm(dim=1))
    x = torch.ones(3, 8, dtype=torch.float16, device=device)
    x[:, 0] = 100
    patch(model)
    with tier(name):
        y = model(x)
        y.backward(torch.full_like(y, 1e-2))
    assert abs(y[0, 0] - 2100) <= 2, "the last place"
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("base", [Embeddings, lambda: Convolutions(2)])
def test_other_layers_are_finite_where_peft_s_are(base):
    torch.manual_seed(0)
    model = adapted(base().to(torch.float16), autocast_adapter_dtype=False, lora_alpha=2e4)
    x = inputs(model.base_model.model, torch.float16)
    wanted = step(model, x)
    assert wanted.output.isfinite().all()
    patch(model)
    assert step(model, x).output.isfinite().all()
