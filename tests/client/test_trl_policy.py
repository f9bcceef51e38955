"""The whole tensors of an adapter whose shards are in several processes (gloo), or in DeepSpeed."""

import datetime
import sys
import types
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from dorad._publish import from_peft_model
from dorad.trl._policy import Policy, problems
from lib.adapters import perturb
from lib.server import free_port
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

WORLD = 2


def build(*further):
    """Two adapters, of which the first is trained; TRL keeps a reference as another one."""
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


def ddp(model):
    return DistributedDataParallel(model)


def fsdp1(model):
    policy = ModuleWrapPolicy({LlamaDecoderLayer})
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
    )


def fsdp1_leaves(model):
    """As PEFT's wrapping policy for FSDP: trained leaves alone, in flat parameters of their own."""
    from peft.utils.other import fsdp_auto_wrap_policy

    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=fsdp_auto_wrap_policy(model),
        use_orig_params=False,
        device_id=torch.device("cpu"),
    )


def fsdp2(model):
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def run(rank, port):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=120),
    )
    try:
        for wrap in ddp, fsdp1, fsdp1_leaves, fsdp2:
            model = build()
            policy = Policy(model)
            found = policy.tensors(wrap(model), keep=rank == 0)
            if rank == 0:
                check(found)
            else:
                assert found == {}
    finally:
        dist.destroy_process_group()


def test_the_main_process_gets_the_trained_adapter_whole():
    mp.spawn(run, args=(free_port(),), nprocs=WORLD)


def test_of_zero_3_only_the_adapters_parameters_are_gathered(monkeypatch):
    model = build()
    shards = {}
    for number, parameter in enumerate(model.parameters()):
        parameter.ds_id = number
        shards[number] = parameter.data
        parameter.data = torch.empty(0)

    @contextmanager
    def gathered(parameters):
        asked.extend(parameters)
        for parameter in parameters:
            parameter.data = shards[parameter.ds_id]
        yield
        for parameter in parameters:
            parameter.data = torch.empty(0)

    asked = []
    deepspeed = types.ModuleType("deepspeed")
    deepspeed.zero = types.SimpleNamespace(GatheredParameters=gathered)
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    check(Policy(model).tensors(model, keep=True))
    names = {parameter.ds_id: name for name, parameter in model.named_parameters()}
    assert len(asked) == 18 and all(".default" in names[p.ds_id] for p in asked)


def test_names_are_those_of_a_saved_adapter():
    further = ["embed_tokens", "lm_head"]
    model = build(*further)
    check(Policy(model).tensors(model, keep=True), *further)


def test_parameters_beside_the_adapter_are_refused():
    model = build()
    assert problems(model) == []
    model.get_output_embeddings().weight.requires_grad_(True)
    assert problems(model) == [
        "1 trained parameters are not LoRA's or DoRA's: base_model.model.lm_head.weight"
    ]
    assert "give the trainer a peft_config" in problems(model.get_base_model())[0]
