"""An adapter that was trained over a quantised base, served over the base itself."""

import dorad
import dorad.train
import numpy as np
import pytest
import torch
from lib.adapters import LINEARS, perturb
from lib.dora_training import descend
from lib.server import serve
from peft import (
    LoraConfig,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, logging

pytest.importorskip("bitsandbytes")

STEPS = 8
QUANTISED = {
    "nf4": BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=["down_proj", "lm_head"],
    ),
    "int8": BitsAndBytesConfig(load_in_8bit=True),
}
SEQUENCE = list(range(20, 60))


@pytest.fixture(scope="module")
def folder(zoo):
    return zoo.model("llama2")


@pytest.fixture(scope="module")
def client(folder):
    with (
        serve(folder, None, {"engine.kv_bytes": 16 << 20}) as running,
        dorad.Client(running.grpc, timeout=60) as made,
    ):
        yield made


def adapted(folder, quantisation=None):
    logging.disable_progress_bar()
    base = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=QUANTISED.get(quantisation)
    )
    # The 112 columns of down_proj are no whole blocks of 64, which some CPUs dequantise wrongly.
    targets = [name for name in LINEARS if name != "down_proj"]
    config = LoraConfig(
        r=8, lora_alpha=16, use_dora=True, target_modules=targets, task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, config)
    perturb(model, seed=3, delta=0.3)
    return model


def train(model):
    """Returns the losses."""
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, 3e-3)
    made = torch.Generator().manual_seed(4)
    ids = torch.randint(3, 250, (4, 24), generator=made)
    losses = descend(optimizer, STEPS, lambda: model(input_ids=ids, labels=ids).loss)
    assert losses[0] - losses[-1] > 0.1
    return losses


def logprobs(model):
    """Of SEQUENCE from its second token on. In evaluation, some CPUs' 4 bits need rows in 32s."""
    with torch.no_grad():
        logits = model.train()(torch.tensor([SEQUENCE])).logits[0, :-1].log_softmax(-1)
    return logits.gather(1, torch.tensor(SEQUENCE[1:])[:, None])[:, 0].numpy()


def over_the_base(folder, model):
    """PEFT's own log-probabilities of the adapter over the base that was not quantised."""
    plain = adapted(folder)
    set_peft_model_state_dict(plain, get_peft_model_state_dict(model))
    return logprobs(plain)


def served(client, name, model):
    client.publish(name, model=model)
    return client.score([SEQUENCE], name)[0][0][1:]


def distance(first, second):
    return float(np.abs(np.asarray(first) - np.asarray(second)).max())


def test_an_adapter_trained_over_4_bits_is_served_as_pefts(folder, client):
    theirs = adapted(folder, "nf4")
    wanted = train(theirs)
    ours = adapted(folder, "nf4")
    dorad.train.patch(ours)
    assert max(abs(a - b) for a, b in zip(train(ours), wanted, strict=True)) < 1e-4
    result = served(client, "nf4", ours)
    assert distance(result, over_the_base(folder, theirs)) < 2e-3
    assert distance(result, over_the_base(folder, adapted(folder))) > 0.1, "training did nothing"


@pytest.mark.parametrize("quantisation", QUANTISED)
def test_the_server_computes_norms_over_its_own_base(folder, client, quantisation):
    model = adapted(folder, quantisation)
    dorad.train.patch(model)
    train(model)
    result = served(client, quantisation, model)
    apart = distance(result, over_the_base(folder, model))
    assert apart < 5e-5
    # What the trainer itself computes differs by what quantising changes.
    assert 2 * apart < distance(result, logprobs(model)) < 1
