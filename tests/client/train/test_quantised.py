"""QDoRA: norms over weights that bitsandbytes has quantised, against PEFT's own layers."""

import copy

import pytest
import torch
from dorad.train import UnsupportedLayersError, explain, patch, unpatch
from dorad.train._quantised import QuantisedWeight, _Product
from lib.dora_training import assert_close, descend, distance, perturb, step
from lib.peak import peak_bytes
from peft import LoraConfig, get_peft_model
from peft.utils.integrations import dequantize_module_weight
from torch import nn

bnb = pytest.importorskip("bitsandbytes")

KINDS = {
    "nf4": lambda i, o, **more: bnb.nn.Linear4bit(
        i, o, quant_type="nf4", compute_dtype=torch.float32, compress_statistics=False, **more
    ),
    "nf4, nested": lambda i, o, **more: bnb.nn.Linear4bit(
        i, o, quant_type="nf4", compute_dtype=torch.float32, **more
    ),
    "fp4": lambda i, o, **more: bnb.nn.Linear4bit(
        i, o, quant_type="fp4", compute_dtype=torch.float32, **more
    ),
    "nf4, bytes as bf16": lambda i, o, **more: bnb.nn.Linear4bit(
        i, o, quant_type="nf4", compute_dtype=torch.float32, quant_storage=torch.bfloat16, **more
    ),
    "8 bits": lambda i, o, **more: bnb.nn.Linear8bitLt(i, o, has_fp16_weights=False, **more),
}


DEVICES = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append("cuda")


class Quantised(nn.Module):
    """Of the second linear, blocks of 64 values do not end with the rows; 200 is no multiple of 32.

    Its inputs are 64 wide.
    """

    def __init__(self, kind):
        super().__init__()
        self.up = KINDS[kind](64, 200)
        self.down = KINDS[kind](200, 96, bias=False)
        self.is_loaded_in_4bit = kind != "8 bits"
        self.is_loaded_in_8bit = kind == "8 bits"

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def build(kind, device="cpu", **options):
    torch.manual_seed(0)
    base = Quantised(kind).to(device)  # quantises
    config = LoraConfig(r=8, use_dora=True, target_modules=["up", "down"], **options)
    model = get_peft_model(base, config)
    perturb(model)
    return model


def layers(model):
    return [model.base_model.model.up, model.base_model.model.down]


def batch(device="cpu"):
    made = torch.Generator().manual_seed(5)
    return torch.randn(3, 7, 64, generator=made).to(device).requires_grad_()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", DEVICES)
def test_forward_and_gradients_are_pefts(device, kind, dropout):
    # On the CPU PEFT's own layer loses the scales of 8 bits in its first forward.
    wanted = step(build(kind, device, lora_dropout=dropout), batch(device))
    model = build(kind, device, lora_dropout=dropout)
    assert len(patch(model).layers) == len(explain(model, 4)) == 2
    for _ in range(3):
        assert_close(step(model, batch(device)), wanted, 2e-5)
    unpatch(model)
    assert_close(step(model, batch(device)), wanted, 0)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["nf4", "8 bits"])
def test_under_autocast_it_is_pefts_to_its_own_rounding(kind, dropout):

    def autocast():
        return torch.autocast("cpu", torch.bfloat16)

    model, theirs = build(kind, lora_dropout=dropout), build(kind, lora_dropout=dropout)
    wanted = step(theirs, batch(), context=autocast())
    patch(model)
    exact = step(model, batch())
    got = step(model, batch(), context=autocast())
    assert distance(got.output.float(), exact.output) < 0.03
    for name, gradient in wanted.gradients.items():
        own = distance(gradient, exact.gradients[name])
        assert distance(got.gradients[name], exact.gradients[name]) < 3 * own + 2e-3, name


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_the_dequantised_matrix(kind):
    for layer in layers(build(kind)):
        base = layer.get_base_layer()
        whole = dequantize_module_weight(base).detach()
        parts = list(QuantisedWeight(base).parts())
        assert len(parts) > 1
        assert torch.equal(torch.cat([part for _, part in parts]).to(whole.dtype), whole)
        assert torch.equal(
            torch.cat([torch.arange(1000)[rows] for rows, _ in parts]), torch.arange(len(whole))
        )


@pytest.mark.parametrize("factors", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", DEVICES)
def test_norms_are_those_of_the_dequantised_matrix(device, dtype, factors):
    torch.manual_seed(0)
    base = KINDS["nf4, nested"](192, 160, bias=False).to(dtype).to(device)
    weight = QuantisedWeight(base)
    assert weight.dtype == dtype
    a = torch.randn(8, 192, device=device).to(factors)
    b = 0.02 * torch.randn(160, 8, device=device).to(factors)
    dense = torch.cat([part for _, part in weight.parts()]).double()
    wanted = (dense + 0.5 * b.double() @ a.double()).norm(dim=1)
    norm = weight.norm(a, b, 0.5)
    assert norm.dtype == torch.float32
    assert distance(norm.double(), wanted) < (1e-6 if device == "cpu" else 2e-5)


@pytest.mark.parametrize("kind", ["nf4", "8 bits"])
def test_the_whole_dequantised_matrix_is_never_held(kind):
    """Of all tensors that are made in a norm or a product, none has more than an eighth or so."""
    made = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.is_floating_point():
                made.append(result.numel())
            return result

    torch.manual_seed(0)
    base = KINDS[kind](512, 1024, bias=False).to("cpu")
    a, b, x = torch.randn(4, 512), torch.randn(1024, 4), torch.randn(2, 512, requires_grad=True)
    weight = QuantisedWeight(base)
    with Watch():
        weight.norm(a, b, 0.5)
        weight.product(x).sum().backward()
    assert 512 * 1024 // 8 <= max(made) <= 512 * 1024 // 8 + 1024
    whole = 4 * 512 * 1024
    assert peak_bytes(lambda: weight.norm(a, b, 0.5), "cpu") < whole / 2
    made.clear()
    with Watch():
        dequantize_module_weight(base)
    assert max(made) >= 512 * 1024, "PEFT's whole matrix was not seen"


def test_the_product_has_the_gradient_of_its_input():
    weight = QuantisedWeight(KINDS["nf4"](64, 96, bias=False).to("cpu"))
    dense = torch.cat([part for _, part in weight.parts()])
    x = torch.randn(5, 64, requires_grad=True)
    y = _Product.apply(x, weight)
    assert distance(y.detach(), x.detach() @ dense.T) < 1e-6
    (gradient,) = torch.autograd.grad((y * y).sum(), x)
    assert distance(gradient, 2 * (x.detach() @ dense.T) @ dense) < 1e-6


def test_weights_in_bitsandbytes_own_layout_for_the_cpu():
    """On some CPUs an evaluation changes the layout of a 4-bit weight."""
    from bitsandbytes.functional import _convert_weight_packed_for_cpu

    base = KINDS["nf4, nested"](192, 160, bias=False).to("cpu")
    before = torch.cat([part for _, part in QuantisedWeight(base).parts()])
    weight = base.weight
    weight.data, weight.quant_state = _convert_weight_packed_for_cpu(
        weight.data, weight.quant_state
    )
    parts = [part for _, part in QuantisedWeight(base).parts()]
    assert len(parts) > 1
    assert distance(torch.cat(parts), before) < 2**-8  # The scales have been rounded to bf16.


def test_a_matrix_that_bitsandbytes_dequantises_wrongly_is_refused():
    """Its kernels for CPUs with AVX-512 do so where blocks do not end with the rows."""
    torch.manual_seed(0)
    base = KINDS["nf4"](112, 64, bias=False).to("cpu")
    state, codes = base.weight.quant_state, base.weight.data.flatten()
    codes = torch.stack([codes >> 4, codes & 15], 1).int()
    values = state.code[codes].view(-1, 64) * state.absmax[:, None]
    wanted = values.view(64, 112)
    assert torch.equal(torch.cat([part for _, part in QuantisedWeight(base).parts()]), wanted)
    is_right = torch.equal(dequantize_module_weight(base), wanted)
    assert QuantisedWeight(base).is_computed_right() == is_right
    root = nn.Module()
    root.down, root.is_loaded_in_4bit = base, True
    model = get_peft_model(root, LoraConfig(r=4, use_dora=True, target_modules=["down"]))
    if is_right:
        assert len(patch(model).layers) == 1
        return
    with pytest.raises(UnsupportedLayersError, match="dequantises its 112 columns wrongly here"):
        patch(model)


def test_a_weight_that_is_not_quantised_yet_is_refused():
    model = build("8 bits")
    for layer in layers(model):
        layer.get_base_layer().weight = bnb.nn.Int8Params(torch.ones(2, 2), requires_grad=False)
    with pytest.raises(UnsupportedLayersError, match="is not quantised yet"):
        patch(model)


def test_training_follows_peft():
    losses = {}
    target = torch.randn(3, 7, 96, generator=torch.Generator().manual_seed(6))
    for name in ("peft", "patched"):
        model = build("nf4, nested")
        if name == "patched":
            patch(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, 1e-2)
        losses[name] = descend(
            optimizer, 20, lambda model=model: (model(batch()) - target).square().mean()
        )
    assert losses["peft"][0] - losses["peft"][-1] > 0.1
    assert max(abs(a - b) for a, b in zip(*losses.values(), strict=True)) < 1e-5


@pytest.mark.parametrize("kind", ["nf4, nested", "8 bits"])
def test_merging_is_pefts(kind):
    model, theirs = build(kind), build(kind)
    patch(model)
    before = step(model, batch())
    for each in (model, theirs):
        each.merge_adapter()
    got, wanted = (each(batch()).detach() for each in (model, theirs))
    assert distance(got, wanted) < 1e-6
    assert distance(got, before.output) < 0.2  # Quantising rounds the sum again.


def test_copies_keep_their_weights():
    model = build("nf4")
    patch(model)
    wanted = step(model, batch())
    assert_close(step(copy.deepcopy(model), batch()), wanted, 0)
