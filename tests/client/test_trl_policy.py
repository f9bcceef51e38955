"""The policies that dorad.trl refuses."""

from dorad.trl._policy import problems
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM


def build():
    sizes = dict(hidden_size=24, intermediate_size=40, num_hidden_layers=2, vocab_size=50)
    base = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes))
    config = LoraConfig(r=4, target_modules=["q_proj"], use_dora=True, task_type="CAUSAL_LM")
    return get_peft_model(base, config)


def test_parameters_beside_the_adapter_are_refused():
    model = build()
    assert problems(model) == []
    model.get_output_embeddings().weight.requires_grad_(True)
    assert problems(model) == [
        "1 trained parameters are not LoRA's or DoRA's: base_model.model.lm_head.weight"
    ]
    assert "give the trainer a peft_config" in problems(model.get_base_model())[0]
