"""Patched models under torch.compile, gradient checkpointing and autocast."""

import copy
import functools
import statistics

import pytest
import torch
import torch._dynamo
from dorad.train import patch, tier
from lib.dora_training import (
    Convolutions,
    Embeddings,
    Linears,
    adapted,
    assert_close,
    distance,
    inputs,
    perturb,
    step,
)
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint


def build(base=Linears, dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = adapted(base().to(dtype), **options)
    patch(model)
    return model


# --- torch.compile --------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def convolutions():
    return Convolutions(2)


@pytest.mark.parametrize(
    ("base", "dtype", "tolerance", "name"),
    [
        (Linears, torch.float32, 1e-6, "fused"),
        (Linears, torch.float32, 1e-6, "eager"),
        (Linears, torch.float32, 1e-6, "auto"),
        (Linears, torch.bfloat16, 2**-7, "fused"),
        (Embeddings, torch.float32, 1e-6, "fused"),
        (Embeddings, torch.float32, 1e-6, "eager"),
        (convolutions, torch.float32, 1e-6, "fused"),
        (convolutions, torch.float32, 1e-6, "eager"),
        # Each takes more than a second.
        pytest.param(Linears, torch.bfloat16, 2**-7, "eager", marks=pytest.mark.deep),
        pytest.param(Linears, torch.bfloat16, 2**-7, "auto", marks=pytest.mark.deep),
        pytest.param(Embeddings, torch.float32, 1e-6, "auto", marks=pytest.mark.deep),
        pytest.param(convolutions, torch.float32, 1e-6, "auto", marks=pytest.mark.deep),
    ],
)
def test_compiles_into_one_graph_with_the_same_numbers(base, dtype, tolerance, name):
    model = build(base, dtype)
    x = inputs(model.base_model.model, dtype)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with tier(name):
        wanted = step(model, x)
        got = step(compiled, x)
    got.gradients = {k.removeprefix("_orig_mod."): v for k, v in got.gradients.items()}
    assert_close(got, wanted, tolerance)


def test_compiled_code_follows_changed_parameters():
    model = build()
    x = inputs(model.base_model.model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with tier("fused"):
        first = step(compiled, x)
        perturb(model, seed=8)
        with torch.no_grad():
            model.base_model.model.up.base_layer.weight.mul_(1.5)
        second, wanted = step(compiled, x), step(model, x)
    assert distance(second.output, wanted.output) < 1e-6
    assert distance(second.output, first.output) > 1e-2


# --- Gradient checkpointing -----------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, model, reentrant):
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def forward(self, x):
        return checkpoint(self.model, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("name", ["fused", "eager", "auto"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_nothing(reentrant, name):
    model = build(lora_dropout=0.3)
    x = inputs(model.base_model.model)
    with tier(name):
        wanted = step(model, x)
        got = step(Checkpointed(model, reentrant), x)
    got.gradients = {k.removeprefix("model."): v for k, v in got.gradients.items()}
    assert_close(got, wanted, 0)


# --- Autocast -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32 base", "bf16 base"])
@pytest.mark.parametrize("name", ["fused", "eager"])
def test_autocast_is_as_near_the_truth_as_peft(name, dtype):
    """By the median over seeds: one rounding falls as it likes."""
    context = torch.autocast("cpu", torch.bfloat16)
    errors = {}
    for seed in range(15):
        torch.manual_seed(seed)
        model = adapted(Linears().to(dtype), seed=seed)
        x = inputs(model.base_model.model, dtype, seed)
        truth = step(copy.deepcopy(model).double(), x.detach().double().requires_grad_())
        theirs = step(model, x, context=context)
        patch(model)
        with tier(name):
            ours = step(model, x, context=context)
        assert ours.output.dtype == theirs.output.dtype == torch.bfloat16
        for whose, result in (("ours", ours), ("theirs", theirs)):
            for key, got in {"output": result.output, **result.gradients}.items():
                wanted = truth.output if key == "output" else truth.gradients[key]
                assert got.dtype == theirs.gradients.get(key, theirs.output).dtype
                errors.setdefault((key, whose), []).append(distance(got, wanted.to(got.dtype)))
    for key, whose in errors:
        median = statistics.median(errors[key, whose])
        assert median <= 2 * statistics.median(errors[key, "theirs"]) + 2**-10, key


def test_norms_under_autocast_are_those_without():
    model = build()
    layer = model.base_model.model.up
    seen = []
    dora = layer.lora_magnitude_vector["default"]
    norm = type(dora)._norm
    dora._norm = lambda *arguments: seen.append(norm(dora, *arguments)) or seen[-1]
    x = inputs(model.base_model.model)
    with torch.no_grad():
        layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            layer(x)
    assert seen[0].dtype == seen[1].dtype == torch.float32
    assert torch.equal(seen[0], seen[1])


# --- Forward mode ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fused", "eager", "auto"])
@pytest.mark.parametrize("way", ["dual numbers", "torch.func"])
@pytest.mark.parametrize("base", [Linears, Embeddings, lambda: Convolutions(2)])
def test_forward_derivatives_are_pefts(base, way, name):
    torch.manual_seed(0)
    model = adapted(base().double())
    x = inputs(model.base_model.model, torch.float64).detach()
    values = {key: parameter.detach() for key, parameter in model.named_parameters()}
    tangents = {
        key: torch.randn_like(value) if "lora_" in key else torch.zeros_like(value)
        for key, value in values.items()
    }

    def derivative():
        if way == "torch.func":
            call = functools.partial(torch.func.functional_call, model, args=(x,))
            return torch.func.jvp(lambda given: call(given), (values,), (tangents,))[1]
        with forward_ad.dual_level():
            duals = {key: forward_ad.make_dual(values[key], tangents[key]) for key in values}
            return forward_ad.unpack_dual(torch.func.functional_call(model, duals, (x,))).tangent

    wanted = derivative()
    patch(model)
    with tier(name):
        assert distance(derivative(), wanted) < 1e-12
