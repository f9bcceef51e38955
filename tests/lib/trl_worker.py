"""AsyncGRPOTrainer and its real rollout worker: trl_worker.py TARGET URL MODEL FOLDER.

Publishes three versions of a DoRA policy while the worker generates. Prints, for each sample, its
version and the largest difference of its log-probabilities from those of each version.
"""

import json
import sys
from pathlib import Path

import torch
import trl
from datasets import Dataset
from dorad.trl import served
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer

from lib import trl_runs

CONFIG = LoraConfig(r=8, target_modules=["q_proj", "up_proj"], use_dora=True, task_type="CAUSAL_LM")


def reward(completion_ids, **_):
    return [float(len(set(ids))) for ids in completion_ids]


def make(target: str, url: str, model: str, folder: str):
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # It asks for a GPU.
    tokenizer = trl_runs.tokenizer(model)
    tokenizer.pad_token = "<pad>"
    # One that TRL can parse answers of.
    template = Path(trl.__file__).with_name("chat_templates") / "qwen2_5.jinja"
    tokenizer.chat_template = template.read_text()
    return served(AsyncGRPOTrainer, target)(
        model=model,
        reward_funcs=reward,
        args=AsyncGRPOConfig(
            output_dir=folder,
            vllm_server_base_url=url,
            use_cpu=True,
            bf16=False,
            report_to=[],
            max_steps=2,
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=16,
            temperature=1.0,
            max_inflight_tasks=4,
            max_staleness=1,
            dtype="float32",
        ),
        train_dataset=Dataset.from_dict(
            {"prompt": [[{"role": "user", "content": f"port {i}?"}] for i in range(7)]}
        ),
        processing_class=tokenizer,
        peft_config=CONFIG,
    )


def difference(model, sample) -> float:
    ids = torch.as_tensor(sample.input_ids)
    with torch.inference_mode():
        rows = model(ids[None]).logits[0].float().log_softmax(-1)
    own = rows[:-1].gather(1, ids[1:, None])[:, 0]
    made = torch.as_tensor(sample.completion_mask[1:]).bool()
    return float((own - torch.as_tensor(sample.old_log_probs[1:]))[made].abs().max())


def main() -> None:
    torch.set_num_threads(1)
    target, url, model, folder = sys.argv[1:]
    trainer = make(target, url, model, folder)
    trained = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
    versions, samples = {}, []

    def synchronise() -> None:
        with torch.no_grad():
            for parameter in trained.values():
                parameter.add_(0.02 * torch.randn_like(parameter))
        trainer._sync_weight()
        versions[trainer.model_version] = {n: p.detach().clone() for n, p in trained.items()}

    synchronise()
    worker = trainer.rollout_worker
    worker.start()
    try:
        for version in 1, 2, 3:
            while not samples or samples[-1].model_version != version:
                samples.append(worker.rollout_buffer.get(timeout=200))
                worker.check_health(200)
            if version < 3:
                synchronise()
    finally:
        worker.stop()
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    reference = get_peft_model(base, CONFIG).eval()
    rows = [{"version": sample.model_version, "differences": {}} for sample in samples]
    for version, tensors in versions.items():
        reference.load_state_dict(tensors, strict=False)
        for row, sample in zip(rows, samples, strict=True):
            row["differences"][version] = difference(reference, sample)
    print(json.dumps({"name": trainer._lora_name, "rows": rows}))


if __name__ == "__main__":  # The worker's process imports this file for `reward`.
    main()
