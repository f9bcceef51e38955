"""TRL's asynchronous GRPO without its training: its client and its rollout worker, for real.

Arguments: URL, model folder, adapters' root. Publishes trl-policy-v1 to v3 while the worker
generates, in the order of AsyncGRPOTrainer._sync_weight_lora. Prints the samples.
"""

import json
import os
import sys
import types
from pathlib import Path

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
URL, FOLDER, ROOT = sys.argv[1:]
MAX_STALENESS = 1


def reward(completion_ids, **_):
    return [float(len(set(ids))) for ids in completion_ids]


def main():
    import trl
    from accelerate.state import PartialState
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.experimental.async_grpo import async_rollout_worker
    from trl.experimental.async_grpo.async_grpo_trainer import select_adapter_sync
    from trl.experimental.async_grpo.vllm_client import VLLMClient

    PartialState()  # For TRL's log.
    async_rollout_worker.is_vllm_available = lambda *_, **__: True  # The server is dorad.
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, pad_token="<pad>")
    # One that TRL can parse answers of.
    template = Path(trl.__file__).with_name("chat_templates") / "qwen2_5.jinja"
    tokenizer.chat_template = template.read_text()

    client = VLLMClient(URL, server_timeout=60)
    client.wait_for_server_ready()
    info = client.get_server_info()
    base = AutoModelForCausalLM.from_pretrained(FOLDER)
    model = PeftModel.from_pretrained(base, f"{ROOT}/lora-0", is_trainable=True)
    by_adapter = select_adapter_sync(
        info, model, types.SimpleNamespace(max_staleness=MAX_STALENESS)
    )

    worker = async_rollout_worker.AsyncRolloutWorker(
        model_name=FOLDER,
        dataset=[{"prompt": [{"role": "user", "content": f"port {i}?"}]} for i in range(7)],
        reward_funcs=[reward],
        processing_class=tokenizer,
        eos_token_ids=[2],
        num_generations=2,
        max_inflight_tasks=4,
        vllm_server_url=URL,
        lora_name="trl-policy",
        max_tokens=48,
        temperature=0.7,
        top_p=0.9,
        request_timeout=120,
    )

    def sync(version):
        client.pause()
        client.load_lora_adapter(f"trl-policy-v{version}", f"{ROOT}/lora-{version - 1}")
        client.resume()
        stale = version - (MAX_STALENESS + 1)
        if stale > 0:
            client.unload_lora_adapter(f"trl-policy-v{stale}")
        worker.update_model_version(version)

    samples = []

    def take(until):
        while not any(until(sample) for sample in samples[-1:]):
            samples.append(worker.rollout_buffer.get(timeout=120))
            worker.check_health(120)

    sync(1)
    worker.start()
    try:
        take(lambda sample: len(samples) >= 4)
        sync(2)
        take(lambda sample: sample.model_version == 2)
        sync(3)
        take(lambda sample: sample.model_version == 3)
        take(lambda sample: len(samples) >= 16)
        worker.check_health(120)
    finally:
        worker.stop()
    rows = [
        {
            "ids": sample.input_ids.tolist(),
            "mask": sample.completion_mask.tolist(),
            "logprobs": sample.old_log_probs.tolist(),
            "version": sample.model_version,
        }
        for sample in samples
    ]
    facts = {
        "by_adapter": by_adapter,
        "dtype": client.get_dtype(),
        "max_model_len": client.get_max_model_len(),
        "world_size": client.get_world_size(),
    }
    print(json.dumps({"samples": rows, **facts}))


if __name__ == "__main__":  # The worker's process imports this file for `reward`.
    main()
