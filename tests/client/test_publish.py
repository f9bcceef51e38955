"""What can be published, and what is sent of it."""

import asyncio
import copy
import enum
import json
import threading

import dorad
import dorad.aio
import numpy as np
import pytest
import safetensors.numpy


def test_uploads_a_folder_in_chunks(client, server, folder):
    seen = []
    version = client.publish("a", path=folder, progress=lambda *at: seen.append(at))
    image = (folder / "adapter_model.safetensors").read_bytes()
    assert server.images["a", 1] == ('{"peft_type": "LORA", "r": 4}', image)
    assert server.chunk_sizes == [1 << 20, 1 << 20, len(image) - (2 << 20)]
    assert seen[-1] == (len(image), len(image)) and len(seen) == 3
    assert (version.name, version.version, version.label) == ("a", 1, "a@1")
    assert version.active and version.state == "ready" and version.kind == "dora"
    assert version.timing.norms == 0.25 and version.generation == 2
    assert version.create_time.tzinfo is not None and len(version.digest) == 64


def test_server_side_path(client, server):
    version = client.publish("a", path="/adapters/a", server_side=True, tags={"step": "3"})
    assert server.images["a", 1][1] == b"/adapters/a" and version.tags == {"step": "3"}
    assert server.chunk_sizes == []


def test_a_version_is_durable_only_when_asked_for(client, folder):
    assert not client.publish("a", path=folder).durable
    assert client.publish("a", path=folder, durable=True).durable
    assert client.publish("a", path="/adapters/a", server_side=True, durable=True).durable
    assert [version.durable for version in client.adapters("a")] == [False, True, True]


def test_uploads_numpy_tensors_as_safetensors(client, server):
    tensors = {
        "a.lora_A.weight": np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32),
        "b.lora_B.weight": np.ones((5, 3), np.float16).T,  # Not contiguous.
        "c.scalar": np.array(2.5),
    }
    client.publish("a", tensors=tensors, config={"r": 3, "target_modules": {"q", "k"}})
    config, image = server.images["a", 1]
    assert json.loads(config) == {"r": 3, "target_modules": ["k", "q"]}
    loaded = safetensors.numpy.load(image)
    assert loaded.keys() == tensors.keys()
    for name, array in tensors.items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], array)


def test_uploads_torch_tensors_in_bf16(client, server):
    import torch  # Slow to import: only the tests that need it pay.
    from safetensors.torch import load

    weight = torch.nn.Parameter(torch.randn(4, 6).to(torch.bfloat16).t())
    client.publish("a", tensors={"w": weight, "none": torch.empty(0, 4)}, config="{}")
    loaded = load(server.images["a", 1][1])
    assert loaded["w"].dtype == torch.bfloat16 and torch.equal(loaded["w"], weight)
    assert loaded["none"].shape == (0, 4)


def test_takes_a_peft_config_object(client, server):
    class TaskType(enum.StrEnum):
        CAUSAL = "CAUSAL_LM"

    class Init(enum.Enum):
        PLAIN = True

    class Config:  # As peft.LoraConfig: to_dict() keeps its sets and enums.
        def to_dict(self):
            return {
                "r": 8,
                "target_modules": {"q_proj", "k_proj"},
                "task_type": TaskType.CAUSAL,
                "init_lora_weights": Init.PLAIN,
            }

    client.publish("a", tensors={"w": np.zeros(2, np.float32)}, config=Config())
    assert json.loads(server.images["a", 1][0]) == {
        "r": 8,
        "target_modules": ["k_proj", "q_proj"],
        "task_type": "CAUSAL_LM",
        "init_lora_weights": True,
    }


@pytest.fixture(scope="module")
def peft_model():
    """A tiny model with the adapters "default" (DoRA, active) and "other" (LoRA)."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1)
    base = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_attention_heads=2))
    dora = LoraConfig(r=2, target_modules=["q_proj"], use_dora=True, task_type="CAUSAL_LM")
    lora = LoraConfig(r=3, target_modules=["v_proj", "up_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(base, dora)
    model.add_adapter("other", lora)
    return model


@pytest.mark.parametrize("adapter", [None, "default", "other"])
def test_uploads_a_peft_model_as_it_saves_itself(client, server, peft_model, tmp_path, adapter):
    from safetensors.torch import load, load_file

    client.publish("a", model=peft_model, model_adapter=adapter)
    name = adapter or "default"
    peft_model.save_pretrained(tmp_path, selected_adapters=[name])
    saved = tmp_path / name if name != "default" else tmp_path
    config, image = server.images["a", 1]
    sent, expected = load(image), load_file(saved / "adapter_model.safetensors")
    assert sent.keys() == expected.keys() and len(sent) == {"default": 3, "other": 4}[name]
    assert all(sent[key].equal(expected[key]) for key in expected)
    file = json.loads((saved / "adapter_config.json").read_text())
    differing = {key for key in file if json.loads(config)[key] != file[key]}
    # save_pretrained marks its copy as not to be trained; lists made of sets have no order.
    assert differing <= {"inference_mode", "target_modules"}
    assert sorted(json.loads(config)["target_modules"]) == sorted(file["target_modules"])


@pytest.fixture
def process_group():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("wrapper", ["compile", "part", "ddp", "parallel", "compile of ddp"])
def test_wrappers_of_a_model_are_taken_off(client, server, peft_model, process_group, wrapper):
    import torch
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    client.publish("plain", model=peft_model)
    model = peft_model
    if wrapper == "part":
        model = copy.deepcopy(peft_model)
        layers = model.base_model.model.model.layers
        layers[0] = torch.compile(layers[0])
    if "ddp" in wrapper:
        model = DistributedDataParallel(model)
    if wrapper == "parallel":
        model = DataParallel(model)
    if "compile" in wrapper:
        model = torch.compile(model)
    client.publish("wrapped", model=model)
    assert server.images["wrapped", 1] == server.images["plain", 1]


def test_a_wrapper_of_another_kind_is_named(client, peft_model):
    import torch

    with pytest.raises(TypeError, match=r"must be a peft.PeftModel, not Sequential"):
        client.publish("a", model=torch.nn.Sequential(peft_model))


def test_refuses_an_adapter_that_the_model_does_not_have(client, peft_model):
    with pytest.raises(ValueError, match=r"no adapter 'mine', only \['default', 'other'\]"):
        client.publish("a", model=peft_model, model_adapter="mine")
    peft_model.base_model.set_adapter(["default", "other"])
    try:
        with pytest.raises(ValueError, match="name one"):
            client.publish("a", model=peft_model)
    finally:
        peft_model.set_adapter("default")


def test_large_tensors_are_cut_at_one_mebibyte(client, server):
    client.publish("a", tensors={"w": np.zeros(600_000, np.float32)}, config={})
    assert max(server.chunk_sizes) == 1 << 20
    assert sum(server.chunk_sizes) == len(server.images["a", 1][1])


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({}, ValueError, "exactly one of path, tensors and model"),
        ({"path": "/x", "tensors": {"w": np.zeros(1)}}, ValueError, "exactly one"),
        ({"tensors": {"w": np.zeros(1)}}, ValueError, "needs config"),
        ({"tensors": {}, "config": {}}, ValueError, "empty"),
        ({"tensors": {"w": np.zeros(1, np.int64)}, "config": {}}, TypeError, "'w'.*int64"),
        ({"tensors": {"w": np.zeros(1)}, "config": 3}, TypeError, "int"),
        ({"tensors": {"w": np.zeros(1)}, "config": {"x": object()}}, TypeError, "object"),
        ({"path": "/nowhere/at/all"}, FileNotFoundError, "/nowhere/at/all"),
        ({"tensors": {"w": np.zeros(1)}, "server_side": True}, ValueError, "server_side"),
        ({"path": "/x", "model": object(), "server_side": True}, ValueError, "server_side"),
        ({"path": "out/x", "server_side": True}, ValueError, "absolute, not 'out/x'"),
        ({"path": "/x", "model": object()}, ValueError, "exactly one"),
        ({"path": "/x", "model_adapter": "a"}, ValueError, "model_adapter needs model"),
        ({"model": object()}, TypeError, "PeftModel, not object"),
    ],
)
def test_refuses_what_cannot_be_published(client, arguments, error, words):
    with pytest.raises(error, match=words):
        client.publish("a", **arguments)


def test_names_the_missing_file(client, folder):
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match="safe_serialization"):
        client.publish("a", path=folder)


def test_a_refused_upload_says_why(client, folder):
    with pytest.raises(dorad.InvalidArgument) as caught:
        client.publish("a/b", path=folder)
    assert caught.value.reason == "BAD_NAME" and caught.value.violations[0].field == "name"


def test_a_failure_while_reading_reaches_the_caller(client, folder):
    def explode(sent, total):
        raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        client.publish("a", path=folder, progress=explode)
    assert client.adapters() == []


def test_keep_last_is_sent_only_when_given(client, server, folder):
    client.publish("a", path=folder)
    client.publish("a", path=folder, keep_last=0)
    client.publish("a", path=folder, keep_last=3)
    sent = [b.keep_last if b.HasField("keep_last") else None for b in server.publish_begins]
    assert sent == [None, 0, 3]


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_publishing_from_memory_waits_for_a_buffer_only_as_long_as_it_may(server, tmp_path, kind):
    arguments = dict(tensors={"w": np.ones(2, np.float32)}, config={}, timeout=0.5)

    async def publish(shared):
        async with dorad.aio.Client(server.target) as client:
            await client.publish_from_memory("a", shared_memory=shared, **arguments)

    def call():
        try:
            if kind == "asyncio":
                asyncio.run(publish(shared))
            else:
                with dorad.Client(server.target) as client:
                    client.publish_from_memory("a", shared_memory=shared, **arguments)
        except dorad.DoradError as error:
            errors.append(error)

    errors = []
    with dorad.SharedTensors(tmp_path / "memory.sock") as shared:
        shared._free.clear()  # Other publishes have them.
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
    assert isinstance(errors[0], dorad.DeadlineExceeded) and "buffer" in str(errors[0])
