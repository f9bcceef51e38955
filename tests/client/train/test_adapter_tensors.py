"""The whole tensors of an adapter by the names under which PEFT saves them.

tests/integration/test_publish_shards.py has those of models in shards.
"""

import pytest
import torch
from dorad._publish import from_peft_model
from dorad.train import adapter_tensors
from lib.adapters import perturb
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


def build(*further):
    """Two adapters, of which the first is active; TRL keeps a reference as another one."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=24, intermediate_size=40, num_hidden_layers=2, vocab_size=50)
    base = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes))
    targets = ["q_proj", "o_proj", "up_proj", *further]
    config = LoraConfig(r=4, target_modules=targets, use_dora=True, task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    perturb(model, seed=1)
    model.add_adapter("ref", config)
    return model


def wanted(*further):
    """As PEFT saves it, which adds the base weights of the embedding."""
    saved = from_peft_model(build(*further), None)[0]
    return {name: tensor for name, tensor in saved.items() if "lora_" in name}


def check(found, *further):
    expected = wanted(*further)
    assert found.keys() == expected.keys() and len(found) == (6 + len(further)) * 3
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_names_are_those_of_a_saved_adapter():
    further = ["embed_tokens", "lm_head"]
    model = build(*further)
    check(adapter_tensors(model), *further)


def test_wrappers_do_not_matter():
    model = build()
    check(adapter_tensors(nn.Sequential(torch.compile(model))))
    with pytest.raises(ValueError, match="has no adapter 'other', only"):
        adapter_tensors(model, "other")
    with pytest.raises(TypeError, match=r"peft\.PeftModel, not LlamaForCausalLM"):
        adapter_tensors(model.get_base_model())
    assert not torch.equal(*(adapter_tensors(model, name)[FIRST] for name in ("default", "ref")))
