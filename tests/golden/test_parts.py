"""Models of several parts, whose text is served: adapters of older versions, and what reaches the
other parts."""

import copy
import json
import re
import shutil

import grpc
import numpy as np
import pytest
from dorad import Client, DoradError
from lib.adapters import WEIGHTS, perturb
from lib.pictures import FAMILIES
from lib.server import serve
from lib.tiny_models import IMAGE
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

SPELLINGS = {
    "qwen25_vl": ["model."],
    "qwen3_vl": ["model."],
    "mistral3": ["language_model.model.", "model."],
    "gemma3": ["language_model.model.", "model."],
    "qwen35": ["model."],
}
# Older versions name them without the model.
PARTS = r"model\.((visual|vision_tower|multi_modal_projector)\.)"


def respelled(folder, body, target):
    """A copy of an adapter under the names of an older version of transformers."""
    shutil.copytree(folder, target)
    path = target / "adapter_model.safetensors"
    tensors = {
        re.sub(PARTS, r"\1", name.replace("model.language_model.", body)): value
        for name, value in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("family", SPELLINGS)
def test_an_adapter_of_an_older_version_is_the_same_adapter(zoo, tmp_path, family):
    folder = zoo.adapter(family, "dora_embedding")
    adapters = {"new": folder}
    for i, body in enumerate(SPELLINGS[family]):
        adapters[f"old{i}"] = respelled(folder, body, tmp_path / f"old{i}")
    (sequence,) = zoo.sequences(family)[1:2]
    with serve(zoo.model(family), adapters) as server:
        (scores,) = server.wire.score([sequence], list(adapters))
        base = server.wire.score([sequence], [""])[0][0]
    for score in scores:
        assert np.array_equal(score.logprobs[1:], scores[0].logprobs[1:])
    assert np.abs(scores[0].logprobs[1:] - base.logprobs[1:]).max() > 0.05


@pytest.fixture
def text(zoo, tmp_path):
    """A model of several parts whose configuration has no tower: its text is served."""
    folder = shutil.copytree(zoo.model("gemma3"), tmp_path / "text")
    config = json.loads((folder / "config.json").read_text())
    del config["vision_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_an_adapter_of_a_tower_that_is_not_served_is_refused_by_name(zoo, text, tmp_path):
    folder = shutil.copytree(zoo.adapter("gemma3", "dora"), tmp_path / "tower")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"exclude_modules": None}))
    with (
        serve(text) as server,
        Client(server.grpc) as client,
        pytest.raises(DoradError) as refusal,
    ):
        client.publish("tower", path=folder)
    assert "ADAPTER_PART_NOT_SERVED" in [each.reason for each in refusal.value.violations]
    assert "model.vision_tower.encoder.layers.0.mlp.fc1" in str(refusal.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_of_a_tower_has_the_names_of_older_versions_too(zoo, tmp_path, family):
    folder = zoo.adapter(family, "dora_tower")
    with serve(zoo.model(family)) as server, Client(server.grpc) as client:
        digest = client.publish("new", path=folder).digest
        for i, body in enumerate(SPELLINGS[family]):
            old = respelled(folder, body, tmp_path / f"old{i}")
            assert client.publish(f"old{i}", path=old).digest == digest


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_of_a_served_tower_is_whole(zoo, tmp_path, family):
    base = copy.deepcopy(zoo.oracle(family).base)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, use_dora=True, target_modules="all-linear")
    model = get_peft_model(base, config)
    perturb(model, seed=3)
    model.save_pretrained(tmp_path / "whole")
    tensors = load_file(tmp_path / "whole" / WEIGHTS)
    linears = [name for name in tensors if name.endswith("lora_A.weight")]
    count = {"mistral3": 17, "qwen35": 10}.get(family, 12)
    assert sum(".language_model." not in name for name in linears) == count
    with serve(zoo.model(family)) as server, Client(server.grpc) as client:
        info = client.publish("whole", path=tmp_path / "whole")
    assert info.num_modules == len(linears)


def test_a_prompt_with_an_image_is_refused_by_name(text):
    with serve(text) as server:
        with pytest.raises(grpc.RpcError) as refusal:
            server.wire.generate([5, IMAGE, 6], max_tokens=2)
        assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "stands for an image" in refusal.value.details()
