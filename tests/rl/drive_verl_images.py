"""verl's rollout of prompts with images: its processor, clients and servers for real.

Arguments: model folder, adapters' root. Prints the differences of the answers' log-probabilities
from PEFT's, of the same pixels and of others.
"""

import asyncio
import json

import numpy as np
import PIL.Image
import ray
import torch
from drive_verl import FOLDER, ROOT, PolicyWorker, Session, configuration, refusal
from peft import PeftModel
from transformers import AutoModelForImageTextToText
from verl.utils.config import omega_conf_to_dataclass

SIZES = [[(12, 8)], [(9, 21), (20, 22)], []]  # height and width of each prompt's pictures
TEMPERATURE = 0.7
SAMPLES = 3


def adapted(adapter):
    base = AutoModelForImageTextToText.from_pretrained(FOLDER, dtype=torch.float32)
    return PeftModel.from_pretrained(base, f"{ROOT}/{adapter}", is_trainable=True)


class ImageWorker(PolicyWorker):
    def load(self, adapter, spoilt):
        self.module = adapted(adapter)
        if spoilt:
            with torch.no_grad():
                tower = self.module.get_base_model().model.visual
                tower.patch_embed.proj.weight.view(-1)[5] += 0.25


def picture(height, width):
    values = np.random.default_rng(height * width).integers(0, 256, (height, width, 3), np.uint8)
    return PIL.Image.fromarray(values)


def prompt(processor, pictures):
    content = [*({"type": "image", "image": each} for each in pictures)]
    content.append({"type": "text", "text": "Look."})
    return processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )


def logprobs(model, inputs, tokens):
    """PEFT's, of the tokens after the prompt."""
    ids = torch.cat([inputs["input_ids"], torch.tensor([tokens])], dim=1)
    image = model.config.image_token_id
    values = {k: v for k, v in inputs.items() if k in ("pixel_values", "image_grid_thw")}
    with torch.inference_mode():
        logits = model(input_ids=ids, mm_token_type_ids=(ids == image).int(), **values).logits[0]
    rows = torch.log_softmax(logits.float() / TEMPERATURE, dim=-1)[:-1]
    return rows.gather(1, ids[0, 1:, None])[-len(tokens) :, 0]


async def main(session, processor):
    found = {"refused": [], "same": [], "others": [], "placeholders": 0}
    params = {"temperature": TEMPERATURE, "logprobs": True, "max_tokens": 16, "ignore_eos": True}

    async def generate(inputs, **data):
        return await session.client.generate(
            request_id="r",
            prompt_ids=inputs["input_ids"][0].tolist(),
            sampling_params=params,
            **data,
        )

    def refused_update():
        return refusal(
            lambda: ray.get(session.group.update_weights("dora_tower-0", 1, spoilt=True))
        )

    found["base"] = await asyncio.to_thread(refused_update)
    await session.update("dora_tower-0", 1)
    model = adapted("dora_tower-0")
    for sizes in SIZES:
        pictures = [picture(*size) for size in sizes]
        inputs = prompt(processor, pictures)
        data = {"image_data": pictures} if pictures else {}
        outputs = await asyncio.gather(*(generate(inputs, **data) for _ in range(SAMPLES)))
        turned = prompt(processor, [each.rotate(180) for each in pictures])
        for output in outputs:
            ours = torch.tensor(output.log_probs)
            tokens = output.token_ids
            found["placeholders"] += sum(t in (3, 4) for t in tokens)
            for name, other in (("same", inputs), ("others", turned)):
                difference = (ours - logprobs(model, other, tokens)).abs().max()
                found[name].append(float(difference))
    for data in {"video_data": ["x"]}, {"image_data": [picture(8, 8)]}:
        found["refused"].append(await session.refused(generate, inputs=inputs, **data))
    return found


if __name__ == "__main__":
    ray.init(num_cpus=32, include_dashboard=False, object_store_memory=128 << 20)
    lengths = ("prompt_length=100", "response_length=60")
    config = configuration(*(f"actor_rollout_ref.rollout.{length}" for length in lengths))
    model_config = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    session = Session(config, ImageWorker)
    print(json.dumps(asyncio.run(main(session, model_config.processor))))
