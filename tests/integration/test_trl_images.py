"""TRL and images: the policy that trains on pictures is the one that samples."""

import pytest
import torch
from datasets import Dataset
from dorad import _processor_images
from dorad.trl import UnsupportedError, served
from lib import trl_runs
from lib.adapters import perturb
from lib.pictures import photo
from lib.processors import gemma3, qwen3_vl
from lib.server import serve
from lib.tiny_models import IMAGE, VIDEO
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText
from trl import GRPOConfig, GRPOTrainer

# Text and tower.
MODULES = r".*(q_proj|v_proj|down_proj|attn\.qkv|mlp\.(linear_)?fc1)"
QUESTIONS = ["What is it?", "Which is larger?", "Describe both.", "Why?"]
# The pictures of each question: TRL needs one at least.
SIZES = [[(12, 8)], [(9, 21), (8, 8)], [(8, 16)], [(20, 22)]]

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def folder(zoo):
    return zoo.model_with_processor("qwen3_vl")


def served_at(folder, path):
    settings = {
        "model.device": "cpu",
        "model.compute_dtype": "fp32",
        "server.shared_memory_socket": path,
    }
    return serve(folder, settings=settings)


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    with served_at(folder, tmp_path_factory.mktemp("trl") / "memory.sock") as running:
        yield running


def policy(folder, seed=3):
    base = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    config = LoraConfig(
        r=8, lora_alpha=16, target_modules=MODULES, use_dora=True, task_type="CAUSAL_LM"
    )
    adapted = get_peft_model(base, config)
    perturb(adapted, seed, 0.1)
    return adapted


def dataset():
    rows = [(f"{q} {i}", s) for i in range(4) for q, s in zip(QUESTIONS, SIZES, strict=True)]
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": question}],
                "images": [photo(len(question) + h, h, w) for h, w in sizes],
            }
            for question, sizes in rows
        ]
    )


def reward(completions, **_):
    texts = [message["content"] for (message,) in completions]
    return [float(len(set(text))) + 0.1 * text.count("e") for text in texts]


def trainer(server, folder, scratch, processor=qwen3_vl, **changes):
    values = trl_runs.arguments(scratch, num_generations=4, max_steps=3) | changes
    return served(GRPOTrainer, server.grpc, shared_memory=True)(
        model=policy(folder),
        reward_funcs=reward,
        args=GRPOConfig(**values),
        train_dataset=dataset(),
        processing_class=processor(folder),
    )


def test_the_policy_that_sees_pictures_is_the_trained_one(server, folder, tmp_path, figures):
    trained = trainer(server, folder, tmp_path, max_steps=5)
    the_sampled_policy_is_the_trained_one(trained, {IMAGE, VIDEO}, figures)


def test_so_is_that_of_gemma(zoo, tmp_path, figures):
    """Its processor's placeholder is not that of an image's tokens."""
    folder = zoo.model_with_processor("gemma3")
    with served_at(folder, tmp_path / "memory.sock") as server:
        trained = trainer(server, folder, tmp_path, gemma3, max_steps=5)
        the_sampled_policy_is_the_trained_one(trained, {IMAGE}, figures)


def the_sampled_policy_is_the_trained_one(trained, unsampled, figures):
    recorder = trl_runs.Recorder(trained)
    trained.train()
    means = trl_runs.differences(trained)
    kind = trained.model.config.model_type
    figures.append(f"trl with pictures, {kind}: sampling difference {max(means):.1e}")
    assert len(means) == 5 and 0 < max(means) < 1e-4
    counts = set()
    for _, version, requests, answers in recorder.calls:
        assert [(request.n, request.adapter) for request in requests] == [(4, version.ref)] * 2
        for request, samples in zip(requests, answers, strict=True):
            images = request.images or []
            counts.add(len(images))
            assert sum(image.length for image in images) == list(request.token_ids).count(IMAGE)
            assert not any(unsampled & set(s.token_ids.tolist()) for s in samples)
    assert counts == {1, 2}


def test_other_pixels_than_the_trainers_show(server, folder, tmp_path, monkeypatch):
    placed = _processor_images.placed

    def of_others(processor, config, token_ids, pictures):
        return placed(processor, config, token_ids, [picture.rotate(180) for picture in pictures])

    monkeypatch.setattr(_processor_images, "placed", of_others)
    trained = trainer(server, folder, tmp_path)
    trained.train()
    assert max(trl_runs.differences(trained)) > 1e-3


def test_equal_prompts_with_other_pictures_are_other_prompts(server, folder, tmp_path):
    generation = trainer(server, folder, tmp_path).vllm_generation
    requests = []
    generate_many = generation.client.generate_many
    generation.client.generate_many = lambda given, **options: (
        requests.extend(given) or generate_many(given, **options)
    )
    prompt = [5, 1, *[IMAGE] * 6, 0, 7]
    one, same, other = photo(1, 12, 8), photo(1, 12, 8), photo(2, 12, 8)
    generation.generate([prompt] * 4, [[one], [other], [same], [one]], 1)
    assert [request.n for request in requests] == [3, 1]
    first, second = (request.images[0].sha256 for request in requests)
    assert first != second


def test_a_server_of_texts_refuses_pictures(zoo, tmp_path):
    model = zoo.model_with_tokenizer("llama2")
    with serve(model, settings={"model.device": "cpu"}) as server:
        trained = trl_runs.trainer(
            served(GRPOTrainer, server.grpc), GRPOConfig, trl_runs.policy(model), tmp_path
        )
        with pytest.raises(UnsupportedError, match="images"):
            trained.vllm_generation.generate([[5], [6]], [None, [photo(1, 8, 8)]], 1)


def test_no_sample_has_a_placeholder(server, folder, tmp_path):
    """A model fails on one without its image: not even a bias makes it a sample's token."""
    changes = {"generation_kwargs": {"logit_bias": {IMAGE: 100.0, VIDEO: 100.0}}}
    generation = trainer(server, folder, tmp_path, **changes).vllm_generation
    _, tokens, _, _ = generation.generate([[5, 6, 7]] * 8, None, 1)
    assert not {IMAGE, VIDEO} & {token for row in tokens for token in row}
