"""Patched models against PEFT's own: outputs and all gradients, adapters far from their start."""

import copy

import pytest
import torch
from dorad.train import patch, tier
from lib.dora_training import (
    Convolutions,
    Embeddings,
    Linears,
    adapted,
    assert_close,
    descend,
    distance,
    inputs,
    perturb,
    step,
)
from lib.tiers import deep
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

MODELS = {
    "linears": Linears,
    "embeddings": Embeddings,
    "conv1d": lambda: Convolutions(1),
    "conv2d": lambda: Convolutions(2),
    "conv3d": lambda: Convolutions(3),
}
# In fp64 both do the same mathematics: what is left is rounding, 1e-13 of the largest value.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5}


def build(name, dtype=torch.float32, **options):
    torch.manual_seed(0)
    return adapted(MODELS[name]().to(dtype), **options)


def check(model, x, tolerance, **options):
    """PEFT's step, then ours."""
    wanted = step(model, x, **options)
    assert len(wanted.gradients) >= 4
    patch(model)
    for name in ("fused", "eager", "auto"):
        with tier(name):
            assert_close(step(model, x, **options), wanted, tolerance)
    return wanted


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", MODELS)
def test_every_layer_type(name, dtype):
    model = build(name, dtype)
    check(model, inputs(model.base_model.model, dtype), TOLERANCES[dtype])


@pytest.mark.parametrize("name", MODELS)
def test_the_comparison_would_see_an_initial_adapter(name):
    """An untrained adapter does nothing: what the tests above compare must not be that."""
    torch.manual_seed(0)
    base = MODELS[name]()
    x = inputs(base)
    plain = base(x).detach()
    model = adapted(base)
    assert distance(model(x).detach(), plain) > 0.1


OPTIONS = {
    "rslora": dict(use_rslora=True),
    "negative alpha": dict(lora_alpha=-3),
    "rank above the width": dict(r=44),
    "patterns": dict(
        rank_pattern={"up": 7, "plain": 2, "strided": 2},
        alpha_pattern={"down": 11, "middle": 1.5, "scaled": 9, "pointwise": 3},
    ),
    "bias trained": dict(bias="all"),
    "bias of adapted layers trained": dict(bias="lora_only"),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option(name, option):
    model = build(name, torch.float64, **OPTIONS[option])
    check(model, inputs(model.base_model.model, torch.float64), 1e-12)


@pytest.mark.parametrize("name", ["linears", "conv2d"])
def test_dropout(name):
    model = build(name, torch.float64, lora_dropout=0.4)
    x = inputs(model.base_model.model, torch.float64)
    wanted = check(model, x, 1e-12)
    assert distance(step(model, x, seed=4).output, wanted.output) > 1e-3, "nothing was dropped"
    model.eval()
    assert distance(step(model, x, seed=4).output, wanted.output) > 1e-3
    torch.testing.assert_close(step(model, x, seed=4).output, step(model, x, seed=5).output)


@pytest.mark.parametrize("name", MODELS)
def test_frozen_magnitudes(name):
    model = build(name, torch.float64)
    for key, parameter in model.named_parameters():
        if "magnitude" in key:
            parameter.requires_grad_(False)
    wanted = check(model, inputs(model.base_model.model, torch.float64), 1e-12)
    assert not [key for key in wanted.gradients if "magnitude" in key]


@pytest.mark.parametrize("name", MODELS)
def test_several_adapters_one_by_one_and_at_once(name):
    model = build(name, torch.float64)
    model.add_adapter("second", copy.copy(model.peft_config["default"]))
    perturb(model, seed=8)
    x = inputs(model.base_model.model, torch.float64)
    results = {}
    for active in (["default"], ["second"], ["default", "second"]):
        model.base_model.set_adapter(active)
        results[str(active)] = step(model, x)
    patch(model)
    outputs = []
    for active in (["second"], ["default", "second"], ["default"]):
        model.base_model.set_adapter(active)
        got = step(model, x)
        assert_close(got, results[str(active)], 1e-12)
        outputs.append(got.output)
    assert distance(outputs[0], outputs[1]) > 1e-2 < distance(outputs[1], outputs[2])


def test_trained_base_weights():
    """Their gradients are PEFT's, and their norms follow from step to step."""
    model = build("linears", torch.float64)
    for key, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in key or "base_layer" in key)
    twin = copy.deepcopy(model)
    patch(model)
    x = inputs(model.base_model.model, torch.float64)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, twin)]
    for _ in range(3):
        got, wanted = step(model, x), step(twin, x)
        assert "base_model.model.up.base_layer.weight" in wanted.gradients
        assert_close(got, wanted, 1e-11)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("name", MODELS)
def test_eval_and_no_grad(name):
    model = build(name, torch.float64).eval()
    x = inputs(model.base_model.model, torch.float64)
    with torch.no_grad():
        wanted = model(x)
    patch(model)
    for mode in torch.no_grad, torch.inference_mode:
        with mode():
            assert distance(model(x), wanted) <= 1e-12


@pytest.mark.parametrize("autocast_adapter_dtype", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_bf16_base_is_as_near_the_truth_as_peft(name, autocast_adapter_dtype):
    """The base in bf16, adapters in fp32 (PEFT's default) or bf16 (PEFT rounds norms, too)."""
    torch.manual_seed(0)
    base = MODELS[name]().to(torch.bfloat16)
    model = adapted(base, autocast_adapter_dtype=autocast_adapter_dtype)
    if name.startswith("conv") and autocast_adapter_dtype:
        model.float()  # PEFT adds fp32 to bf16 there, and the next layer then refuses its input.
    x = inputs(base, next(base.parameters()).dtype)
    exact_x = x.detach().double().requires_grad_() if x.is_floating_point() else x
    truth = step(copy.deepcopy(model).double(), exact_x)
    theirs = step(model, x)
    patch(model)
    for tier_name in ("fused", "eager"):
        with tier(tier_name):
            ours = step(model, x)
        for key, wanted in truth.gradients.items():
            wanted = wanted.to(ours.gradients[key].dtype)
            assert ours.gradients[key].dtype == theirs.gradients[key].dtype
            error = distance(ours.gradients[key], wanted)
            assert error <= 1.5 * distance(theirs.gradients[key], wanted) + 2**-7, key
        wanted = truth.output.to(ours.output.dtype)
        assert distance(ours.output, wanted) <= 1.5 * distance(theirs.output, wanted) + 2**-7


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
        ),
    ],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_updates_below_the_last_place_of_the_base_product_are_not_lost(device, autocast):
    """What B adds early in a training is less than bf16 holds of x Wᵀ, and yet must count.

    The share that arrives is a projection of the outputs on the adapter's part: 1 where it enters
    before the rounding, and about 0 where it is added to what was rounded already.
    """
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(256, 512, bias=False)).to(torch.bfloat16)
    config = LoraConfig(r=8, target_modules=["0"], use_dora=True)
    model = get_peft_model(base, config, autocast_adapter_dtype=autocast).to(device)
    layer = model.base_model.model[0]
    with torch.no_grad():
        layer.lora_B["default"].weight.normal_(std=3e-5)
    truth = copy.deepcopy(model).double()
    without = copy.deepcopy(truth)
    with torch.no_grad():  # of the same g: 1, but for the rounding of the magnitudes
        without.base_model.model[0].lora_B["default"].weight.zero_()
    patch(model)
    x = torch.randn(4096, 256).to(device, torch.bfloat16).requires_grad_()
    exact_x = x.detach().double().requires_grad_()
    grad = torch.randn(4096, 512).to(device, torch.bfloat16)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        y = model(x)
    y.backward(grad)
    wanted, d_wanted = _outputs(truth, exact_x, grad)
    plain, d_plain = _outputs(without, exact_x, grad)
    assert float((wanted - plain).std() / wanted.std()) < 2**-8
    assert _share(y, wanted, plain) == pytest.approx(1, abs=0.1)
    if device == "cpu":  # cuBLAS rounds before it adds, as autograd does for PEFT.
        assert _share(x.grad, d_wanted, d_plain) == pytest.approx(1, abs=0.1)


def _outputs(model, x, grad):
    y = model(x)
    (d_x,) = torch.autograd.grad(y, x, grad.double())
    return y.detach(), d_x


def _share(rounded, exact, without):
    part = exact - without
    return float(((rounded.detach().double() - without) * part).sum() / part.square().sum())


def test_dead_rows_do_nothing_instead_of_nan():
    """A row of zeros with a magnitude of zero, as padding makes them: PEFT divides zero by zero."""
    model = build("linears")
    layer = model.base_model.model.up
    with torch.no_grad():
        for tensor in (
            layer.base_layer.weight,
            layer.lora_B["default"].weight,
            layer.lora_magnitude_vector["default"].weight,
        ):
            tensor[5] = 0
    x = inputs(model.base_model.model)
    assert layer(x)[..., 5].isnan().all()
    patch(model)
    for name in ("fused", "eager"):
        with tier(name):
            result = step(model, x)
            assert torch.equal(
                layer(x)[..., 5], layer.base_layer.bias[5].expand(layer(x).shape[:-1])
            )
        assert result.output.isfinite().all()
        assert all(gradient.isfinite().all() for gradient in result.gradients.values())


def test_200_steps_of_training_stay_together():
    """Adam in fp32 on a small regression: the losses differ by less than 1e-4 of their size."""
    torch.manual_seed(0)
    model = adapted(Linears())
    twin = copy.deepcopy(model)
    patch(model)
    x, target = torch.randn(64, 24), torch.randn(64, 8)
    curves = []
    for trained in model, twin:
        optimizer = torch.optim.Adam([p for p in trained.parameters() if p.requires_grad], lr=3e-3)
        curves.append(
            descend(optimizer, 200, lambda trained=trained: (trained(x) - target).square().mean())
        )
    ours, theirs = map(torch.tensor, curves)
    assert theirs[-1] < 0.7 * theirs[0], "nothing was learned"
    assert ((ours - theirs).abs() / theirs).max() < 1e-4


@pytest.mark.parametrize("checkpointed", [False, True])
def test_loss_curves_of_a_language_model_stay_together(checkpointed):
    """AdamW in fp32, the demo's settings: the mean difference a step is far below the paper's."""
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    torch.manual_seed(0)
    linears = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = LoraConfig(
        r=8, lora_alpha=16, target_modules=linears, use_dora=True, task_type="CAUSAL_LM"
    )
    model = get_peft_model(LlamaForCausalLM(config), lora).train()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    twin = copy.deepcopy(model)
    patch(model)
    data = torch.randint(0, 97, (24, 20), generator=torch.Generator().manual_seed(7))
    curves = []
    for trained in model, twin:
        parameters = [p for p in trained.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=6e-3, weight_decay=0.0)
        losses = []
        for number in range(120 if deep() else 54):
            batch = data[number % 3 :: 3]
            loss = trained(input_ids=batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        curves.append(torch.stack(losses))
    ours, theirs = curves
    assert theirs[-3:].mean() < 0.9 * theirs[:3].mean(), "nothing was learned"
    assert (ours - theirs).abs().mean() < 7e-5


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, -1],
        lambda x: x.transpose(0, 1),
        lambda x: x[:1].expand(4, -1, -1),
        lambda x: x[0],
        lambda x: x[:, :0],
    ],
    ids=["last token", "transposed", "expanded", "a matrix", "no rows"],
)
def test_inputs_of_any_layout(view):
    model = build("linears", torch.float64)
    twin = copy.deepcopy(model)
    patch(model)
    x = inputs(model.base_model.model, torch.float64)
    results = []
    for each in model, twin:
        leaf = x.detach().clone().requires_grad_()
        output = each.base_model.model.up(view(leaf))
        output.square().sum().backward()
        gradients = [p.grad for p in each.base_model.model.up.parameters() if p.requires_grad]
        results.append([output.detach(), leaf.grad, *gradients])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_outputs_may_be_changed_in_place():
    """As by nn.ReLU(inplace=True), or a residual that is added."""
    model = build("linears", torch.float64)
    x = inputs(model.base_model.model, torch.float64)
    up = model.base_model.model.up

    def changed():
        model.zero_grad()
        output = up(x).add_(1).relu_()
        output.square().sum().backward()
        return [output.detach(), *(p.grad.clone() for p in up.parameters() if p.requires_grad)]

    wanted = changed()
    patch(model)
    for ours, theirs in zip(changed(), wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
