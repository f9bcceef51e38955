"""patch and unpatch: what they take, what they refuse, and that all of PEFT still works between."""

import copy
import logging
import subprocess
import sys

import peft
import pytest
import torch
from dorad.train import (
    UnsupportedLayersError,
    _layers,
    explain,
    patch,
    unpatch,
)
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
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

MODELS = {"linears": Linears, "embeddings": Embeddings, "conv2d": lambda: Convolutions(2)}


def build(name="linears", **options):
    torch.manual_seed(0)
    return adapted(MODELS[name]().double(), **options)


def layers(model):
    return [m for m in model.modules() if isinstance(m, peft.tuners.lora.dora.DoraLinearLayer)]


def tiers(model, rows):
    return [layer.tier for layer in explain(model, rows).values()]


def test_the_client_alone_does_not_import_torch():
    code = "import sys, dorad; assert not {'torch', 'peft'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


@pytest.mark.parametrize("name", MODELS)
def test_unpatch_restores_peft(name):
    model = build(name)
    x = inputs(model.base_model.model, torch.float64)
    types = [type(layer) for layer in layers(model)]
    state = [set(vars(layer)) for layer in layers(model)]
    wanted = step(model, x)
    patched = patch(model)
    assert all(type(layer).__module__ == _layers.__name__ for layer in layers(model))
    step(model, x)
    assert unpatch(model) == patched.layers
    assert [type(layer) for layer in layers(model)] == types
    assert [set(vars(layer)) for layer in layers(model)] == state
    assert_close(step(model, x), wanted, 0)
    assert unpatch(model) == ()


def test_names_what_it_patched_and_may_be_called_again():
    model = build()
    first = patch(model)
    prefix = "base_model.model."
    names = tuple(f"{prefix}{name}[default]" for name in ("up", "middle", "down"))
    assert first.layers == names and first.left == {}
    assert patch(model) == first


@pytest.mark.parametrize("name", MODELS)
def test_adapters_that_are_added_later_are_ours_too(name, tmp_path):
    """Also on modules that had no adapter, and those that are loaded."""
    torch.manual_seed(0)
    base = MODELS[name]().double()
    first = next(n for n, module in base.named_modules() if n and not list(module.children()))
    model = get_peft_model(base, LoraConfig(r=4, use_dora=True, target_modules=[first]))
    patch(model)
    assert len(explain(model, 1)) == 1
    targets = {"linears": Linears, "embeddings": Embeddings}.get(name, lambda: Convolutions(2))()
    every = [n for n, module in targets.named_modules() if n]
    model.add_adapter("second", LoraConfig(r=4, use_dora=True, target_modules=every))
    perturb(model)
    model.save_pretrained(tmp_path, selected_adapters=["second"])
    model.load_adapter(tmp_path / "second", "third")
    assert len(explain(model, 1)) == 1 + 2 * len(every)
    assert None not in tiers(model, 1)
    model.base_model.set_adapter(["second"])
    x = inputs(base, torch.float64)
    got = step(model, x)
    unpatch(model)
    assert type(model.base_model) is peft.LoraModel
    assert set(tiers(model, 1)) == {None}
    assert_close(got, step(model, x), 1e-12)
    model.add_adapter("plain", LoraConfig(r=4, target_modules=every))


def test_an_added_adapter_names_layers_that_cannot_be_ours(caplog):
    model = build(target_modules=["down"])
    patch(model)
    base = model.base_model.model.up
    base.weight = QuantisedWeight(base.weight.data, requires_grad=False)
    with caplog.at_level(logging.WARNING, "dorad.train"):
        model.add_adapter("second", LoraConfig(r=4, use_dora=True, target_modules=["up", "down"]))
    assert "up[second]" in caplog.text and "QuantisedWeight" in caplog.text
    up = explain(model, 1)["base_model.model.up[second]"]
    assert up.tier is None and "QuantisedWeight" in up.reason
    assert explain(model, 1)["base_model.model.down[second]"].tier is not None


def test_never_builds_the_dense_product():
    model = build()
    x = inputs(model.base_model.model, torch.float64)
    dense = {(24, 40), (32, 40), (8, 32)}  # the weights' sizes, in order

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        products = identities = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                name = function.overloadpacket
                self.products += name == torch.ops.aten.mm and tuple(sorted(result.shape)) in dense
                self.identities += name == torch.ops.aten.eye
            return result

    with torch.no_grad(), Watch() as watch:
        model(x)
    assert watch.products == watch.identities == 3, "PEFT's products were not seen"
    patch(model)
    with torch.no_grad(), Watch() as watch:
        model(x)
    assert watch.products == watch.identities == 0


# --- Refusals -------------------------------------------------------------------------------------


class QuantisedWeight(nn.Parameter):
    """Stands for the parameter classes of the quantisers."""


def mixture():
    """Two layers that cannot be patched, and one that can."""
    model = build()
    root = model.base_model.model
    base = root.up.base_layer
    base.weight = QuantisedWeight(base.weight.data, requires_grad=False)

    class OtherVariant(type(root.down.lora_variant["default"])):
        pass

    root.down.lora_variant["default"] = OtherVariant()
    return model


def test_refuses_every_unknown_layer_at_once_and_changes_nothing():
    model = mixture()
    with pytest.raises(UnsupportedLayersError) as refusal:
        patch(model)
    left = refusal.value.layers
    assert list(left) == ["base_model.model.up[default]", "base_model.model.down[default]"]
    for name in left:
        assert name in str(refusal.value)
    assert "QuantisedWeight" in str(refusal.value) and "OtherVariant" in str(refusal.value)
    assert set(tiers(model, 1)) == {None}


def test_leaves_unknown_layers_alone_if_told_to_and_says_so(caplog):
    model = mixture()
    x = inputs(model.base_model.model, torch.float64)
    wanted = step(model, x)
    with caplog.at_level(logging.WARNING, "dorad.train"):
        patched = patch(model, strict=False)
    assert patched.layers == ("base_model.model.middle[default]",)
    assert patched.left.keys() == {
        "base_model.model.up[default]",
        "base_model.model.down[default]",
    }
    assert all(name in caplog.text for name in patched.left)
    assert_close(step(model, x), wanted, 1e-12)


def test_refuses_other_kinds_of_lora_layers_and_dora_layers():
    for change in "module", "layer", "dtype":
        model = build()
        up = model.base_model.model.up
        if change == "module":
            up.__class__ = type("Linear4bit", (type(up),), {})
        elif change == "layer":
            layer = up.lora_magnitude_vector["default"]
            layer.__class__ = type("NewDoraLayer", (type(layer),), {})
        else:
            up.base_layer.weight.data = up.base_layer.weight.data.to(torch.float8_e4m3fn)
        with pytest.raises(UnsupportedLayersError) as refusal:
            patch(model)
        assert list(refusal.value.layers) == ["base_model.model.up[default]"]


def test_refuses_a_model_without_dora():
    torch.manual_seed(0)
    plain = get_peft_model(Linears(), LoraConfig(r=2, target_modules=["up"]))
    for model, reason in ((plain, "plain LoRA"), (Linears(), "no LoRA layers")):
        with pytest.raises(ValueError, match=f"no DoRA layers of PEFT: .*{reason}"):
            patch(model)


def test_leaves_plain_lora_adapters_alone():
    model = build()
    model.add_adapter("plain", LoraConfig(r=3, target_modules=["up", "down"]))
    perturb(model, seed=3)
    x = inputs(model.base_model.model, torch.float64)
    model.base_model.set_adapter(["default", "plain"])
    wanted = step(model, x)
    assert len(patch(model).layers) == 3
    assert_close(step(model, x), wanted, 1e-12)


# --- PEFT's own operations on a patched model -----------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_saves_and_loads_as_before(name, tmp_path):
    model = build(name)
    keys = list(model.state_dict())
    model.save_pretrained(tmp_path / "before")
    patch(model)
    assert list(model.state_dict()) == keys
    x = inputs(model.base_model.model, torch.float64)
    wanted = step(model, x)
    model.save_pretrained(tmp_path / "after")
    file = "adapter_model.safetensors"
    assert (tmp_path / "after" / file).read_bytes() == (tmp_path / "before" / file).read_bytes()

    torch.manual_seed(0)
    again = PeftModel.from_pretrained(
        MODELS[name]().double(), tmp_path / "after", is_trainable=True
    )
    patch(again)
    # PEFT loads what it saved in fp32 or wider as it was.
    assert_close(step(again, x), wanted, 1e-12)
    with torch.no_grad():
        for parameter in again.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    again.load_state_dict(model.state_dict())
    assert_close(step(again, x), wanted, 1e-12)
    model.load_adapter(tmp_path / "before", "second", is_trainable=True)
    assert len(patch(model).layers) == 2 * len(layers(again))


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("name", ["linears", "embeddings"])
def test_merges_and_unmerges(name, safe):
    model = build(name).eval()
    patch(model)
    x = inputs(model.base_model.model, torch.float64)
    wanted = step(model, x)
    for _ in range(3):  # The base weights differ by rounding after each turn.
        model.merge_adapter(safe_merge=safe)
        with torch.no_grad():
            assert distance(model(x), wanted.output) < 1e-11
        model.unmerge_adapter()
        assert_close(step(model, x), wanted, 1e-11)
    merged = model.merge_and_unload()
    assert distance(merged(x).detach(), wanted.output) < 1e-11


def test_a_new_adapter_on_merged_weights_has_their_norms():
    """PEFT writes a merged plain LoRA through weight.data, which no version counter sees."""
    model = build()
    patch(model)
    x = inputs(model.base_model.model, torch.float64)
    step(model, x)
    model.add_adapter("plain", LoraConfig(r=3, target_modules=["up", "middle", "down"]))
    perturb(model, seed=3)
    model.base_model.set_adapter("plain")
    model.merge_adapter(["plain"])
    base = model.get_base_model()
    for module in list(base._modules):
        setattr(base, module, getattr(base, module).get_base_layer())
    del base.peft_config
    fresh = adapted(base, seed=9)
    wanted = step(fresh, x)
    patch(fresh)
    assert_close(step(fresh, x), wanted, 1e-12)


def test_disabled_and_deleted_adapters():
    model = build()
    x = inputs(model.base_model.model, torch.float64)
    with model.disable_adapter(), torch.no_grad():
        plain = model(x)
    patch(model)
    with model.disable_adapter(), torch.no_grad():
        assert torch.equal(model(x), plain)
    model.add_adapter("second", copy.copy(model.peft_config["default"]))
    perturb(model, seed=3)
    patch(model)
    model.set_adapter("second")
    step(model, x)
    model.delete_adapter("default")
    assert len(patch(model).layers) == 3
    model.delete_adapter("second")
    unpatch(model)
    assert not any(type(m).__module__.startswith("dorad") for m in model.modules())


def test_set_scale_changes_the_norm_too():
    model = build()
    x = inputs(model.base_model.model, torch.float64)
    twin = copy.deepcopy(model)
    patch(model)
    for each in (model, twin):
        for module in each.modules():
            if hasattr(module, "set_scale"):
                module.set_scale("default", 0.25)
    assert_close(step(model, x), step(twin, x), 1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_pefts_dora_caching_keeps_norms_until_training_goes_on(name):
    from peft.helpers import DoraCaching  # since PEFT 0.19

    model = build(name)
    patch(model)
    x = inputs(model.base_model.model, torch.float64)
    model.eval()
    with torch.no_grad():
        before = model(x)
        with DoraCaching():
            assert torch.equal(model(x), before)
            perturb(model, seed=7)  # PEFT's caching does not see it, either
            changed = model(x)
            kept = [dict(layer._dora_cache) for layer in layers(model)]
        assert all(len(entry) == 1 for entry in kept)
        for entry, layer in zip(kept, layers(model), strict=True):
            (norm,) = entry.values()
            assert norm.shape == (layer.weight.numel(),), "not only the norm was kept"
        fresh = model(x)
        assert distance(changed, fresh) > 1e-6
        with DoraCaching():  # As in PEFT, a forward without caching drops what was kept.
            assert torch.equal(model(x), fresh)
        unpatch(model)
        assert distance(fresh, model(x)) < 1e-12


def test_copies_and_pickles(tmp_path):
    model = build()
    patch(model)
    x = inputs(model.base_model.model, torch.float64)
    wanted = step(model, x)
    assert_close(step(copy.deepcopy(model), x), wanted, 0)
    torch.save(model, tmp_path / "model.pt")
    assert_close(step(torch.load(tmp_path / "model.pt", weights_only=False), x), wanted, 0)
