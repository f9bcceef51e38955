"""The tier of a patched layer: which, why, and who chooses it."""

import copy
import types

import dorad.train
import pytest
import torch
from dorad.train import _compose, _linear, explain, patch, tier
from lib.dora_training import Convolutions, Embeddings, Linears, adapted
from peft import LoraConfig, get_peft_model
from torch import nn


def patched(base=Linears, **options):
    torch.manual_seed(0)
    model = adapted(base().double(), **options)
    patch(model)
    return model


def tiers(model, rows):
    return [layer.tier for layer in explain(model, rows).values()]


def test_explains_the_tier_of_each_layer():
    torch.manual_seed(0)
    model = adapted(Linears())
    assert set(tiers(model, 4)) == {None}
    patch(model)
    large = 1 << 18
    # `middle`, a Conv1D, is not one function: its compose stands alone.
    assert tiers(model, 4) == ["eager"] * 3
    assert tiers(model, 1 << 15) == ["fused_backward"] * 3
    assert tiers(model, 20_000) == ["fused_backward", "eager", "fused_backward"]
    with torch.no_grad():
        assert set(tiers(model, large)) == {"fused_forward"}
    with tier("eager"):
        assert set(tiers(model, large)) == {"eager"}
    with tier("fused"):
        assert set(tiers(model, 4)) == {"fused_backward"}
        with tier("auto"):
            assert "eager" in tiers(model, 4)
        embeddings = patched(Embeddings)
        assert set(tiers(embeddings, large)) == {"eager"}
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert set(tiers(model, large)) == {"fused_forward"}


def test_explains_why():
    large = 1 << 18
    model = adapted(Linears())

    def reasons(rows=large):
        return [why.reason for why in explain(model, rows).values()]

    assert reasons() == ["it is not patched"] * 3
    patch(model)
    alone = "its compose is one pass each way; it is not one function: "
    assert reasons() == [
        "it is one function",
        alone + "its base layer, A or B is no nn.Linear",
        "it is one function",
    ]
    assert reasons(4) == ["its output is small; it is not one function: it is small"] * 3
    with tier("eager"):
        assert reasons()[0] == "the tier is set to eager"
    with torch.autocast("cpu", torch.bfloat16):
        assert reasons()[0] == alone + "its weight is not in autocast's dtype"
    model.base_model.model.up.register_forward_hook(lambda *given: None)  # its own do not matter
    model.base_model.model.down.base_layer.register_forward_hook(lambda *given: None)
    assert reasons()[0] == "it is one function"
    assert reasons()[2] == alone + "there are hooks inside of it"
    model.base_model.model.up.base_layer.weight.requires_grad_()
    assert reasons()[0] == alone + "its base layer is trained"
    model.add_adapter("second", LoraConfig(r=2, target_modules=["up"], use_dora=True))
    assert explain(model, large)["base_model.model.up[second]"].reason.endswith(
        "its base layer is trained"
    )
    model.base_model.set_adapter(["default", "second"])
    assert reasons()[0] == alone + "not just one adapter is active"
    model = patched(lora_dropout=0.1)
    assert reasons()[0] == alone + "it has dropout"
    model = patched(lambda: Convolutions(2))
    assert reasons() == ["it is around a layer of the kind Conv2d"] * 3


@pytest.mark.parametrize("layer", [nn.Linear(64, 64), nn.Conv2d(64, 64, 3, padding=1)])
def test_small_layers_take_plain_operations(layer, monkeypatch):
    """Around a function of our own there are more calls than PEFT makes."""
    model = get_peft_model(
        nn.Sequential(copy.deepcopy(layer)), LoraConfig(r=8, target_modules=["0"], use_dora=True)
    )
    patch(model)
    ours = _linear._DoraLinears, _compose._Eager, _compose._Fused
    called = []
    for function in ours:
        apply = function.apply
        monkeypatch.setattr(
            function, "apply", lambda *given, apply=apply: called.append(1) or apply(*given)
        )

    def functions(images):
        called.clear()
        shape = (images * 16, 64) if isinstance(layer, nn.Linear) else (images, 64, 4, 4)
        model(torch.randn(shape)).sum().backward()
        return len(called)

    assert functions(4) == 0
    assert functions(512) == 1
    for name in "fused", "eager":
        with tier(name):
            assert functions(4) == 1


def test_a_tier_has_one_of_three_names():
    with pytest.raises(ValueError, match="auto, fused, eager"), tier("fastest"):
        pass


def test_the_environment_chooses_the_tier(monkeypatch):
    for value in "auto", "fused", "eager":
        monkeypatch.setenv("DORAD_TRAIN_TIER", value)
        assert dorad.train._tiers._from_environment() == value
    monkeypatch.setenv("DORAD_TRAIN_TIER", "quick")
    with pytest.raises(ValueError, match="DORAD_TRAIN_TIER must be one of auto, fused, eager"):
        dorad.train._tiers._from_environment()


CUDA = torch.device("cuda", 0)


def cuda_tier(rows, out, training=True, dtype=torch.bfloat16):
    chosen = dorad.train._tiers.choose(rows, out, device=CUDA, dtype=dtype, training=training)
    return chosen.tier


def test_on_cuda_training_is_fused_from_the_crossover_on(monkeypatch):
    library = types.SimpleNamespace(why_not_on=lambda device: None)
    monkeypatch.setattr(dorad.train._native, "library", library)
    monkeypatch.setattr(dorad.train._tiers, "_CUDA_MIN_ELEMENTS", 4096)
    assert cuda_tier(64, 64) == "fused_backward"
    assert cuda_tier(63, 64) == "eager"
    assert cuda_tier(1, 64, training=False) == "fused_forward"
    assert cuda_tier(4096, 8192, dtype=torch.float64) == "eager"
    with tier("fused"):
        assert cuda_tier(1, 64) == "fused_backward"
        assert cuda_tier(1, 64, dtype=torch.float64) == "eager"
    with tier("eager"):
        assert cuda_tier(4096, 8192) == cuda_tier(1, 64, training=False) == "eager"


def test_on_cuda_without_the_library_everything_is_eager(monkeypatch):
    monkeypatch.setattr(dorad.train._native, "library", None)
    assert cuda_tier(4096, 8192) == cuda_tier(4096, 8192, training=False) == "eager"
