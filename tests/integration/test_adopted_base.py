"""A trainer's model over the weights of the server on its host."""

from pathlib import Path

import dorad
import dorad.train
import peft
import pytest
import torch
from accelerate import init_empty_weights
from lib.base_weights import greedy, in_files, same
from lib.dora_training import descend
from lib.server import device, serve
from transformers import AutoConfig, AutoModelForCausalLM

FAMILY = "llama3"


def empty_model(folder: Path, dtype: torch.dtype = torch.bfloat16, **changes):
    """The model without its weights, but with its buffers."""
    config = AutoConfig.from_pretrained(folder, **changes)
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def losses(model: torch.nn.Module, steps: int = 4) -> list[float]:
    torch.manual_seed(3)
    config = peft.LoraConfig(r=8, lora_alpha=16, use_dora=True, target_modules="all-linear")
    policy = peft.get_peft_model(model, config)
    dorad.train.patch(policy)
    policy.train()
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=1e-2)
    ids = torch.arange(6, 46).reshape(2, 20).to(policy.device)
    return descend(optimizer, steps, lambda: policy(input_ids=ids, labels=ids).loss)


@pytest.mark.parametrize("family", ["llama3", "qwen2_window", "qwen3_tied"])
def test_training_over_the_servers_base_is_training_over_ones_own(zoo, tmp_path, family) -> None:
    folder = zoo.model(family)
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device())
    settings = {"server.shared_memory_socket": tmp_path / "memory.sock"}
    with serve(folder, None, settings) as server, dorad.Client(server.grpc) as client:
        weights = dorad.train.base_weights(client)
        adopted = empty_model(folder)
        assert dorad.train.adopt_base(adopted, weights) == 0
        assert {n for n, _ in adopted.named_parameters()} == set(weights)
        assert not any(p.requires_grad for p in adopted.parameters())
        tied = adopted.config.tie_word_embeddings
        same_head = adopted.lm_head.weight is adopted.model.embed_tokens.weight
        assert same_head == tied
        assert all(p.data_ptr() == weights[n].data_ptr() for n, p in adopted.named_parameters())
        before = greedy(server)
        mine, theirs = losses(adopted), losses(own)
        assert greedy(server) == before
    assert mine[-1] < mine[0]
    # A GPU's library may choose another kernel for other addresses.
    tolerance = 0.02 if device() == "cuda" else 0.0
    assert mine == pytest.approx(theirs, rel=tolerance, abs=0)


def test_a_model_takes_norms_in_its_own_dtype(zoo, tmp_path) -> None:
    settings = {
        "server.shared_memory_socket": tmp_path / "memory.sock",
        "model.compute_dtype": "bf16",
    }
    with serve(zoo.model("llama2"), None, settings) as server, dorad.Client(server.grpc) as client:
        weights = dorad.train.base_weights(client)  # Norms in fp32, as in the files.
        model = empty_model(zoo.model("llama2"))
        vectors = [tensor for tensor in weights.values() if tensor.ndim == 1]
        assert dorad.train.adopt_base(model, weights) == sum(t.nbytes // 2 for t in vectors)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_trainer_takes_norms_that_are_not_lent_from_its_files(zoo, tmp_path) -> None:
    folder = zoo.model("gemma3_text")
    settings = {
        "server.shared_memory_socket": tmp_path / "memory.sock",
        "model.compute_dtype": "bf16",
    }
    with serve(folder, None, settings) as server, dorad.Client(server.grpc) as client:
        weights = dorad.train.base_weights(client)
        model = empty_model(folder)
        with pytest.raises(dorad.train.BaseWeightsError, match=r"q_norm\.weight: is missing"):
            dorad.train.adopt_base(model, weights)
        norms = {
            name: tensor.to(device())
            for name, tensor in in_files(folder).items()
            if name.endswith("norm.weight")
        }
        dorad.train.adopt_base(model, {**weights, **norms})
        own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        theirs = dict(own.named_parameters())
        for name, parameter in model.named_parameters():
            assert same(parameter.detach(), theirs[name].detach()), name


def test_everything_that_does_not_fit_is_listed_and_nothing_is_changed(zoo, tmp_path) -> None:
    settings = {"server.shared_memory_socket": tmp_path / "memory.sock"}
    with serve(zoo.model(FAMILY), None, settings) as server, dorad.Client(server.grpc) as client:
        weights = dict(dorad.train.base_weights(client))
    name = "model.layers.2.mlp.down_proj.weight"
    del weights[name]
    with torch.device("meta"):  # Without buffers.
        config = AutoConfig.from_pretrained(zoo.model(FAMILY), intermediate_size=128)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    before = {n: id(p) for n, p in model.named_parameters()}
    with pytest.raises(dorad.train.BaseWeightsError) as caught:
        dorad.train.adopt_base(model, weights | {"extra.weight": weights["model.norm.weight"]})
    problems = caught.value.problems
    assert f"{name}: is missing" in problems
    assert "extra.weight: the model has none" in problems
    assert "model.layers.0.mlp.up_proj.weight: has shape [112, 96], not [128, 96]" in problems
    wrong = (
        "model.layers.0.self_attn.q_proj.weight: is torch.bfloat16, the model's is torch.float32"
    )
    assert wrong in problems
    assert any(problem.startswith("model.rotary_emb.inv_freq: ") for problem in problems)
    assert all(problem.split(":")[0] in str(caught.value) for problem in problems)
    assert {n: id(p) for n, p in model.named_parameters()} == before
    untied = empty_model(zoo.model(FAMILY), tie_word_embeddings=False)
    with pytest.raises(dorad.train.BaseWeightsError, match=r"lm_head\.weight: is missing"):
        dorad.train.adopt_base(untied, weights)
