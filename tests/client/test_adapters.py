"""Publishing, the registry and control calls of the sync client, against the fake server."""

import asyncio
import enum
import hashlib
import json
import threading

import dorad
import dorad.aio
import grpc
import numpy as np
import pytest
import safetensors.numpy
from dorad import _retry
from dorad._retry import UploadAttempts
from dorad.v1 import control_pb2
from fake_server import FakeServer, fail, image_of, overloaded, wait_for


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "adapter"
    path.mkdir()
    (path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    image = image_of({"x.lora_A.weight": np.arange(700_000).reshape(7, 100_000)})
    (path / "adapter_model.safetensors").write_bytes(image)
    return path


def test_uploads_a_folder_in_chunks(client, server, folder):
    seen = []
    version = client.publish("a", path=folder, progress=lambda *at: seen.append(at))
    image = (folder / "adapter_model.safetensors").read_bytes()
    assert server.images["a", 1] == ('{"peft_type": "LORA", "r": 4}', image)
    assert server.chunk_sizes == [1 << 20, 1 << 20, len(image) - (2 << 20)]
    assert seen[-1] == (len(image), len(image)) and len(seen) == 3
    assert (version.name, version.version, version.ref) == ("a", 1, "a@1")
    assert version.active and version.state == "ready" and version.kind == "dora"
    assert version.timing.norms == 0.25 and version.generation == 2
    assert version.create_time.tzinfo is not None and len(version.digest) == 64


def test_versions_rise_and_can_be_named(client, folder):
    assert client.publish("a", path=folder).version == 1
    assert client.publish("a", path=str(folder), version=7, activate=False).version == 7
    assert client.adapter("a").version == 1 and not client.adapter("a@7").active
    with pytest.raises(dorad.Conflict) as caught:
        client.publish("a", path=folder, version=7)
    assert caught.value.code == "ALREADY_EXISTS" and caught.value.current_generation is None


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


@pytest.mark.parametrize("source", ["folder", "tensors"])
def test_resumes_a_broken_upload(client, server, folder, source):
    server.break_uploads_at = [1, (1 << 20) + 1, 1]
    seen = []
    arguments = {"path": folder}
    if source == "tensors":
        arrays = {name: np.arange(200_000, dtype=np.float32) for name in "abcd"}
        arguments = {"tensors": arrays, "config": {}}
    version = client.publish("a", **arguments, progress=lambda *at: seen.append(at))
    image = server.images["a", 1][1]
    assert version.version == 1 and version.digest == hashlib.sha256(image).hexdigest()
    # No byte was sent twice.
    assert sum(server.chunk_sizes) == len(image)
    assert seen[-1] == (len(image), len(image))
    assert len({begin.upload_id for begin in server.publish_begins}) == 1
    assert len(server.publish_begins) == 4


def test_each_publish_has_an_upload_id_of_its_own(client, server, folder):
    client.publish("a", path=folder)
    client.publish("a", path=folder)
    assert len({begin.upload_id for begin in server.publish_begins}) == 2


def test_a_lost_answer_does_not_publish_twice(client, server, folder):
    server.lose_answers = 2
    assert client.publish("a", path=folder).version == 1
    assert [v.ref for v in client.adapters()] == ["a@1"]
    assert len(server.publish_begins) == 3


def test_gives_up_when_nothing_comes_through(client, server, folder, monkeypatch):
    monkeypatch.setattr(_retry, "_FIRST_DELAY", 0.001)
    server.lose_answers = 1000
    with pytest.raises(dorad.Unavailable):
        client.publish("a", path=folder)
    # The first failure was progress: all bytes had come.
    assert len(server.publish_begins) <= UploadAttempts.MAX_FAILURES + 1


class Refusing(FakeServer):
    """Refuses uploads: at their begin, or all of them when they are complete."""

    def __init__(self, *begins, commits=None):
        super().__init__()
        self.begins, self.commits, self.bytes = list(begins), commits, 0

    def Publish(self, request_iterator, context):
        if self.begins:
            next(request_iterator)
            self.begins.pop(0)(context)
        return super().Publish(request_iterator, context)

    def add(self, context, begin, image):
        if self.commits is not None:
            self.bytes += len(image)
            del self.uploads[begin.upload_id]
            self.commits(context)
        return super().add(context, begin, image)


def store_unavailable(context):
    fail(context, grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE", "the disk is gone")


def test_an_upload_waits_for_a_server_that_is_full(folder):
    refusals = [overloaded(0.01)] * (2 * UploadAttempts.MAX_FAILURES)
    with Refusing(*refusals) as server, dorad.Client(server.target, timeout=20) as client:
        assert client.publish("a", path=folder).version == 1


@pytest.mark.parametrize("hint", [None, 60])
def test_an_upload_does_not_wait_for_room_in_vain(folder, hint):
    with Refusing(overloaded(hint)) as server, dorad.Client(server.target, timeout=20) as client:
        with pytest.raises(dorad.Overloaded):
            client.publish("a", path=folder)
        assert server.begins == [] and server.versions == {}


@pytest.mark.parametrize("refuse", [store_unavailable, overloaded(0.01)])
def test_an_image_that_the_server_does_not_keep_is_sent_a_few_times_only(monkeypatch, refuse):
    monkeypatch.setattr(_retry, "_FIRST_DELAY", 0.001)
    tensors = {"w": np.zeros(5 << 20, np.float32)}
    with Refusing(commits=refuse) as server, dorad.Client(server.target, timeout=60) as client:
        with pytest.raises((dorad.Unavailable, dorad.Overloaded)):
            client.publish("a", tensors=tensors, config={})
        assert 2 <= server.bytes // (20 << 20) <= 3


def test_no_retries_means_one_attempt(server, folder):
    server.break_uploads_at = [1]
    with dorad.Client(server.target, retries=False) as client, pytest.raises(dorad.Unavailable):
        client.publish("a", path=folder)
    assert len(server.publish_begins) == 1


def test_the_timeout_spans_all_attempts(client, server, folder):
    server.lose_answers = 1000
    with pytest.raises((dorad.Unavailable, dorad.DeadlineExceeded)):
        client.publish("a", path=folder, timeout=0.5)
    assert 1 < len(server.publish_begins) < UploadAttempts.MAX_FAILURES


def test_a_refusal_is_not_tried_again(client, server, folder):
    with pytest.raises(dorad.InvalidArgument):
        client.publish("a/b", path=folder)
    assert len(server.publish_begins) == 1


def test_lists_every_page(client, server, folder):
    for _ in range(5):
        client.publish("a", path=folder)
    client.publish("b", path=folder)
    server.page_size = 2
    assert [v.ref for v in client.adapters()] == ["a@1", "a@2", "a@3", "a@4", "a@5", "b@1"]
    assert [v.ref for v in client.adapters("b")] == ["b@1"]


def test_keep_last_is_sent_only_when_given(client, server, folder):
    client.publish("a", path=folder)
    client.publish("a", path=folder, keep_last=0)
    client.publish("a", path=folder, keep_last=3)
    sent = [b.keep_last if b.HasField("keep_last") else None for b in server.publish_begins]
    assert sent == [None, 0, 3]


def test_activates_with_compare_and_set(client, server, folder):
    client.publish("a", path=folder)
    second = client.publish("a", path=folder, activate=False)
    done = client.activate("a@2", expected_generation=second.generation)
    assert done.adapter.active and done.previous_version == 1
    assert client.activate("a", 1).previous_version == 2
    with pytest.raises(dorad.Conflict) as caught:
        client.activate("a", 2, expected_generation=second.generation)
    assert caught.value.code == "ABORTED" and caught.value.reason == "GENERATION_MOVED"
    assert caught.value.current_generation == server.generation
    with pytest.raises(ValueError, match="which version of 'a'"):
        client.activate("a")


def test_retires(client, folder):
    client.publish("a", path=folder)
    gone = client.retire("a@1", force=True)
    assert gone.state == "retiring" and gone.tags["force"] == "True"
    with pytest.raises(dorad.NotFound) as caught:
        client.adapter("a@1")
    assert caught.value.reason == "ADAPTER_NOT_FOUND"


def test_watches_from_a_generation(client, folder):
    client.publish("a", path=folder)
    client.publish("b", path=folder, activate=False)
    with client.watch(0) as events:
        got = [next(events) for _ in range(3)]
    assert [(e.generation, e.type, e.adapter.ref) for e in got] == [
        (1, "published", "a@1"),
        (2, "activated", "a@1"),
        (3, "published", "b@1"),
    ]
    with pytest.raises(dorad.InvalidArgument) as caught:
        next(client.watch(-1))
    assert caught.value.code == "OUT_OF_RANGE"


def test_closing_a_watch_from_another_thread_ends_it(client):
    events = client.watch()
    timer = threading.Timer(0.1, events.close)
    timer.start()
    assert list(events) == []
    timer.join()


def test_scores_sequences_under_adapters(client, folder):
    client.publish("a", path=folder)
    result = client.score(
        [[1, 2, 3], np.array([4, 5])], [None, "a", "a@1"], top_k=2, chosen_token_ids=[7]
    )
    assert len(result) == 2 and len(result[0]) == 3
    assert result[0][1].dtype == np.float32 and result[0][1].shape == (3,)
    assert np.isnan(result[0][0][0]) and result[1, 2][1] == np.float32(-0.07)
    np.testing.assert_allclose(result[0][1][1:], [-0.03, -0.04], rtol=1e-6)
    assert [v.ref for v in result.versions] == [None, "a@1", "a@1"]
    assert result.top_logprobs[0][0].token_ids.tolist() == [[-1, -1], [0, 1], [0, 1]]
    assert result.chosen_logprobs[1][0].shape == (2, 1)


def test_scores_the_base_model_by_default(client):
    result = client.score([[1, 2]])
    assert len(result[0]) == 1 and result.top_logprobs is None and result.chosen_logprobs is None


def test_aborts_by_id_adapter_or_all(client, server):
    assert client.abort("r1") == 3
    client.abort(["r1", "r2"])
    client.abort(adapter="a@1")
    client.abort(all=True)
    assert [a.WhichOneof("target") for a in server.aborts] == [
        "requests",
        "requests",
        "adapter",
        "all",
    ]
    assert list(server.aborts[1].requests.request_ids) == ["r1", "r2"]
    with pytest.raises(ValueError, match="exactly one"):
        client.abort()
    with pytest.raises(ValueError, match="exactly one"):
        client.abort("r", all=True)


def test_sleeps_and_wakes(client, server):
    assert client.sleep("kv", keep_kv=True, refuse_requests=True) == {"kv": 1 << 20}
    (request,) = server.sleep_requests
    assert request.keep_kv and request.refuse_requests
    assert client.sleep() == {"weights": 1 << 20, "adapters": 1 << 20}
    assert not server.sleep_requests[1].keep_kv
    assert client.info().engine.sleeping == ["adapters", "kv", "weights"]
    client.wake("weights", "adapters")
    assert client.info().engine.sleeping == ["kv"]
    client.wake()
    assert client.info().engine.sleeping == []


def test_yields_and_ends_the_yield(client, server):
    assert client.limit_gpu_share(0.5, time_to_live=2.5, limit_id="a") == 0.5
    assert client.limit_gpu_share(0.75, time_to_live=60, limit_id="b") == 0.5
    assert server.gpu_share_requests[0].time_to_live.ToMilliseconds() == 2500
    assert client.info().engine.gpu_share == 0.5
    assert client.end_gpu_share_limit("a") and not client.end_gpu_share_limit("a")
    assert client.info().engine.gpu_share == 0.75


def test_a_block_renews_its_yield_and_ends_it(client, server):
    with client.limited_gpu_share(0.25, time_to_live=0.15) as share:
        assert share == 0.25 and list(server.gpu_share_limits.values()) == [0.25]
        with client.limited_gpu_share(0.5) as both:
            assert both == 0.25 and len(server.gpu_share_limits) == 2
        assert wait_for(lambda: len(server.gpu_share_requests) >= 5)
        assert len(server.gpu_share_limits) == 1
    assert server.gpu_share_limits == {}
    assert {request.time_to_live.ToMilliseconds() for request in server.gpu_share_requests} == {
        150,
        30_000,
    }


def test_only_the_first_call_of_a_yield_can_fail_the_block(client, server, caplog):
    server.failing_limits = {1}
    with pytest.raises(dorad.DoradError), client.limited_gpu_share(0.25):
        raise AssertionError("must not run")
    server.failing_limits = {3}
    with client.limited_gpu_share(0.25, time_to_live=0.15):
        assert wait_for(lambda: len(server.gpu_share_requests) >= 4)
    assert "could not be renewed" in caplog.text and server.gpu_share_limits == {}
    with pytest.raises(ZeroDivisionError), client.limited_gpu_share(0.25):
        raise ZeroDivisionError
    assert server.gpu_share_limits == {}
    with pytest.raises(ValueError, match="time_to_live"):
        client.limited_gpu_share(0.25, time_to_live=0)


def test_pauses_and_resumes(client, server):
    assert client.pause() == 2 and client.info().engine.paused
    client.pause("wait")
    client.resume()
    assert server.pause_modes == [control_pb2.PAUSE_MODE_KEEP, control_pb2.PAUSE_MODE_WAIT]
    assert not client.info().engine.paused
    client.pause(adapter="a@2")
    assert client.info().engine.paused_adapters == ["a@2"] and not client.info().engine.paused
    client.resume("a@2")
    assert client.info().engine.paused_adapters == []
    with pytest.raises(ValueError, match="abort, wait, keep"):
        client.pause("sleep")


def test_info(client):
    info = client.info()
    assert info.model.vocab_size == 1000 and info.model.eos_token_ids == [2]
    assert info.uptime == 90.0 and info.memory_bytes == {"weights": 1 << 20}
    json.dumps(dorad.types.to_jsonable(info))


def test_health(client, server):
    assert client.health() == "serving"
    client.wait_ready(5)
    server.health.set("", 2)
    assert client.health() == "not_serving"
    with pytest.raises(dorad.Unavailable, match="not_serving"):
        client.wait_ready(0.2)
    with pytest.raises(dorad.NotFound):
        client.health("no.such.Service")


def test_one_client_serves_many_threads(client, folder):
    client.publish("a", path=folder)
    results = []

    def work(i):
        results.append(client.generate([i], adapter="a", max_tokens=3)[0].token_ids[0] == i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 16


def test_progress_is_whole_when_the_last_stream_had_nothing_left_to_send(client, server, folder):
    server.lose_answers = 1
    seen = []
    client.publish("a", path=folder, progress=lambda *at: seen.append(at))
    size = len(server.images["a", 1][1])
    assert seen[-1] == (size, size)


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
