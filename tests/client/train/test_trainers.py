"""One line in a trainer: TRL's, transformers' and Accelerate's lose what they lose with PEFT."""

import copy
import math

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from dorad.train import PatchCallback, get_peft_model, patch, patched, unpatch
from lib.adapters import LINEARS
from lib.dora_training import Linears, adapted, inputs, perturb, step
from lib.trl_runs import logged, tokenizer
from peft import LoraConfig
from peft import get_peft_model as pefts_get_peft_model
from peft.tuners.lora.dora import DoraLinearLayer
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

STEPS = 6


@pytest.fixture(scope="module")
def folder(zoo):
    return zoo.model_with_tokenizer("llama2")


@pytest.fixture(scope="module")
def rows():
    made = torch.Generator().manual_seed(4)
    return [torch.randint(3, 250, (24,), generator=made).tolist() for _ in range(4 * STEPS)]


def base(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def config():
    torch.manual_seed(0)  # of A's initial values
    return LoraConfig(
        r=8, lora_alpha=16, target_modules=LINEARS, use_dora=True, task_type="CAUSAL_LM"
    )


def arguments(path):
    return dict(
        output_dir=str(path),
        use_cpu=True,
        bf16=False,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def ours(model):
    """Of its DoRA layers, whether each is patched."""
    layers = [module for module in model.modules() if isinstance(module, DoraLinearLayer)]
    return {type(layer).__module__.startswith("dorad.") for layer in layers}


class Seen(TrainerCallback):
    """Whether layers were patched in each step."""

    def __init__(self):
        self.patched = set()

    def on_step_end(self, args, state, control, **kwargs):
        self.patched |= ours(kwargs["model"])


def transformers_trainer(model, rows, path, *callbacks):
    data = Dataset.from_dict({"input_ids": rows, "labels": rows})
    return Trainer(
        model=model,
        args=TrainingArguments(**arguments(path)),
        train_dataset=data,
        callbacks=list(callbacks),
    )


def sft_trainer(folder, rows, path, *callbacks):
    """It makes the PEFT model itself."""
    trainer = SFTTrainer(
        model=base(folder),
        args=SFTConfig(**arguments(path), max_length=None, gradient_checkpointing=True),
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=tokenizer(folder),
        peft_config=config(),
        callbacks=list(callbacks),
    )
    perturb(trainer.model)
    return trainer


def losses(trainer):
    trainer.train()
    found = logged(trainer, "loss")
    assert len(found) == STEPS
    return found


def accelerate_losses(model, rows):
    accelerator = Accelerator(cpu=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    batches = torch.utils.data.DataLoader(torch.tensor(rows), batch_size=4)
    optimizer = torch.optim.AdamW(trained, 1e-2)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    found = []
    for ids in batches:
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def assert_same(found, wanted):
    """The wanted losses, of a training that changes them."""
    assert max(wanted) - min(wanted) > 0.05
    assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < 1e-5
    assert all(map(math.isfinite, found))


def perturbed(model):
    perturb(model)
    return model


def test_get_peft_model_in_transformers_trainer(folder, rows, tmp_path):
    seen = Seen()
    model = perturbed(get_peft_model(base(folder), config()))
    found = losses(transformers_trainer(model, rows, tmp_path, seen))
    assert seen.patched == {True}
    theirs = perturbed(pefts_get_peft_model(base(folder), config()))
    assert_same(found, losses(transformers_trainer(theirs, rows, tmp_path)))


def test_a_callback_in_transformers_trainer(folder, rows, tmp_path):
    seen = Seen()
    model = perturbed(pefts_get_peft_model(base(folder), config()))
    theirs = copy.deepcopy(model)
    trainer = transformers_trainer(model, rows, tmp_path, PatchCallback(), seen)
    assert ours(model) == {True}  # before the trainer wraps or compiles it
    found = losses(trainer)
    assert seen.patched == {True}
    assert_same(found, losses(transformers_trainer(theirs, rows, tmp_path)))


def test_a_callback_in_trls_sft_trainer_that_makes_the_peft_model(folder, rows, tmp_path):
    seen = Seen()
    trainer = sft_trainer(folder, rows, tmp_path, PatchCallback(), seen)
    assert ours(trainer.model) == {True}
    found = losses(trainer)
    assert seen.patched == {True}
    assert_same(found, losses(sft_trainer(folder, rows, tmp_path)))


def test_a_callback_that_comes_late_patches_when_training_begins(folder, rows, tmp_path):
    seen = Seen()
    trainer = sft_trainer(folder, rows, tmp_path, seen)
    trainer.add_callback(PatchCallback())
    assert ours(trainer.model) == {False}
    losses(trainer)
    assert seen.patched == {True}


def test_a_callback_refuses_a_model_without_dora(folder, rows, tmp_path):
    plain = config()
    plain.use_dora = False
    with pytest.raises(ValueError, match="plain LoRA"):
        model = pefts_get_peft_model(base(folder), plain)
        transformers_trainer(model, rows, tmp_path, PatchCallback())
    trainer = transformers_trainer(base(folder), rows, tmp_path, PatchCallback())
    with pytest.raises(ValueError, match="no LoRA layers"):
        trainer.train()


def test_get_peft_model_with_accelerate(folder, rows):
    model = perturbed(get_peft_model(base(folder), config()))
    assert ours(model) == {True}
    theirs = perturbed(pefts_get_peft_model(base(folder), config()))
    assert_same(accelerate_losses(model, rows), accelerate_losses(theirs, rows))


def test_a_block_with_accelerate(folder, rows):
    model = perturbed(pefts_get_peft_model(base(folder), config()))
    theirs = copy.deepcopy(model)
    with patched(model) as result:
        found = accelerate_losses(model, rows)
        assert ours(model) == {True} and len(result.layers) == 7 * 3  # of three blocks
    assert ours(model) == {False}
    assert_same(found, accelerate_losses(theirs, rows))


# --- The block alone ------------------------------------------------------------------------------


def test_a_block_restores_every_class_even_after_an_error():
    model = adapted(Linears().double())
    before = [type(module) for module in model.modules()]
    wanted = step(model, inputs(model.base_model.model, torch.float64))
    with pytest.raises(KeyError), patched(model):
        raise KeyError
    assert [type(module) for module in model.modules()] == before
    again = step(model, inputs(model.base_model.model, torch.float64))
    assert torch.equal(again.output, wanted.output)


def test_a_block_leaves_what_was_patched_before():
    model = adapted(Linears())
    patch(model)
    with patched(model), patched(model):
        assert ours(model) == {True}
    assert ours(model) == {True}
    unpatch(model)
    with patched(model):
        with patched(model):
            pass
        assert ours(model) == {True}
    assert ours(model) == {False}
