"""The edges of a number format: g near 1, products at fp16's limit, rows of zeros."""

import copy

import pytest
import torch
from dorad.train import _passes, compose, patch, tier
from lib.dora_training import Convolutions, Embeddings, Linears, adapted, inputs, perturb, step
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dither_of_a_row_depends_on_the_row_alone(dtype):
    """Padding, and other rows of a batch, do not change it."""
    x = torch.randn(300, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = _passes._rows(x)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    assert torch.equal(_passes._rows(x[order]), rows[order])
    assert torch.equal(_passes._rows(x[7:8]), rows[7:8])
    lengths = x.float().norm(dim=1)
    assert (0.499 * lengths <= rows.abs()).all() and (rows.abs() <= 1.001 * lengths).all()
    assert 100 < (rows > 0).sum() < 200 and rows.unique().numel() > 200


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


# --- Rows that nearly cancel ----------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*TIERS, "auto"])
@pytest.mark.parametrize("left", [1e-1, 1e-2, 1e-3, 1e-4, 1e-5])
@pytest.mark.parametrize(
    ("base", "shape"),
    [
        (lambda: nn.Linear(64, 48), (20, 64)),
        (lambda: nn.Linear(768, 512), (300, 768)),
        (lambda: nn.Embedding(64, 48), (20,)),
        (lambda: nn.Conv2d(8, 48, 3), (2, 8, 5, 5)),
    ],
    ids=["linear", "large linear", "embedding", "conv2d"],
)
def test_a_layer_whose_adapter_nearly_cancels_its_weight(base, shape, left, name, device):
    """B·A = -(1 - c)·W in every third row: the rest of W gives PEFT's output and gradients."""
    torch.manual_seed(0)
    model = adapted(nn.Sequential(base()), r=64).to(device)
    layer = model.base_model.model[0]
    weight = layer.base_layer.weight
    with torch.no_grad():
        rows = weight.T if weight.shape == (64, 48) else weight
        delta = copy.deepcopy(layer).double().get_delta_weight("default")
        delta = delta.T if rows is not weight else delta
        rows[::3] = (-delta[::3] / (1 - left)).to(weight)
        if rows is not weight:
            weight.copy_(rows.T)
    exact = copy.deepcopy(model).double()
    embeds = isinstance(layer.base_layer, nn.Embedding)
    x = torch.randint(0, 64, shape) if embeds else torch.randn(shape)
    x = x.to(device)
    wanted = step(exact, x if embeds else x.double())
    theirs = step(model, x)
    patch(model)
    with tier(name):
        ours = step(model, x)

    def error(got, key):
        truth = wanted.output if key == "output" else wanted.gradients[key]
        value = got.output if key == "output" else got.gradients[key]
        return float((value - truth).norm() / truth.norm())

    for key in ("output", *wanted.gradients):
        assert error(ours, key) <= 3 * error(theirs, key) + 1e-6, key


# --- Merged weights -------------------------------------------------------------------------------

MODELS = {
    "linears": Linears,
    "embeddings": Embeddings,
    "conv2d": lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 6, 1)),
}


def dead_row(model):
    """A row of zeros with a magnitude of zero in the first layer, as padding makes them."""
    layer = next(m for m in model.modules() if hasattr(m, "lora_magnitude_vector"))
    embedding = isinstance(layer.base_layer, nn.Embedding)
    with torch.no_grad():
        layer.base_layer.weight[(slice(None), 3) if embedding else 3] = 0
        b = layer.lora_embedding_B["default"] if embedding else layer.lora_B["default"].weight
        b[3] = 0
        layer.lora_magnitude_vector["default"].weight.flatten()[3] = 0
    return layer


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_rows_of_zeros_stay_so_when_merging_and_unmerging(name, safe):
    torch.manual_seed(0)
    model = adapted(MODELS[name]().double()).eval()
    layer = dead_row(model)
    patch(model)
    base = model.base_model.model
    convolutions = isinstance(base, nn.Sequential)
    x = torch.randn(2, 4, 7, 7).double() if convolutions else inputs(base, torch.float64)
    before = layer.base_layer.weight.detach().clone()
    with torch.no_grad():
        wanted = model(x)
        for _ in range(2):
            model.merge_adapter(safe_merge=safe)
            torch.testing.assert_close(model(x), wanted)
            model.unmerge_adapter()
            torch.testing.assert_close(layer.base_layer.weight, before)


@pytest.mark.parametrize("name", MODELS)
def test_a_magnitude_of_zero_over_other_rows_is_lost_as_in_peft(name):
    torch.manual_seed(0)
    model = adapted(MODELS[name]()).eval()
    layer = next(m for m in model.modules() if hasattr(m, "lora_magnitude_vector"))
    with torch.no_grad():
        layer.lora_magnitude_vector["default"].weight.flatten()[3] = 0
    patch(model)
    model.merge_adapter()
    model.unmerge_adapter()
    assert layer.base_layer.weight.isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_merged_rows_have_the_scale_of_the_forward(name, dtype):
    """g within 0.0015 of 1, adapters in half precision: the merged W has g's effect."""
    torch.manual_seed(0)
    wide = {
        "linears": lambda: nn.Sequential(nn.Linear(256, 64)),
        "embeddings": lambda: nn.Sequential(nn.Embedding(256, 64)),
        "conv2d": lambda: nn.Sequential(nn.Conv2d(32, 64, 3)),
    }[name]
    model = get_peft_model(
        wide().to(dtype),
        LoraConfig(r=4, lora_alpha=4, target_modules=["0"], use_dora=True),
        autocast_adapter_dtype=False,
    )
    perturb(model)
    layer = model.base_model.model[0]
    exact = copy.deepcopy(layer).double()
    sums = exact.base_layer.weight + exact.get_delta_weight("default")
    rows = sums.T if name == "embeddings" else sums.flatten(1)
    g = 1 + 0.0015 * torch.randn(64, dtype=torch.float64)
    magnitude = layer.lora_magnitude_vector["default"]
    magnitude.weight = nn.Parameter((g * rows.norm(dim=1)).float().view(magnitude.weight.shape))
    patch(model)
    model.merge_adapter()
    merged = layer.base_layer.weight.double()
    assert layer.base_layer.weight.dtype == dtype
    merged = merged.T if name == "embeddings" else merged.flatten(1)
    effective = (merged * rows).sum(1) / rows.square().sum(1)
    assert (effective - g).square().mean().sqrt() < 4e-4
