"""dorad.verl without verl and Ray: verl's settings, and the gate of its server."""

import asyncio
import pickle
import sys
from types import SimpleNamespace

import pytest
from dorad._unsupported import UnsupportedError
from dorad._verl.gate import Gate
from dorad._verl.settings import problems, request_options, server_settings

CONTEXT = 100


def rollout(**changes):
    """As verl's defaults, except for tensor_model_parallel_size."""
    values = dict(
        tensor_model_parallel_size=1,
        data_parallel_size=1,
        pipeline_model_parallel_size=1,
        expert_parallel_size=1,
        checkpoint_engine=SimpleNamespace(backend="naive"),
        dtype="bfloat16",
        logprobs_mode="processed_logprobs",
        scheduling_policy="fcfs",
        quantization=None,
        qat=None,
        mtp=SimpleNamespace(enable=False, enable_rollout=False),
        enable_rollout_routing_replay=False,
        limit_images=None,
        prometheus=SimpleNamespace(enable=False),
        profiler=None,
        max_model_len=None,
        max_num_seqs=256,
        enable_prefix_caching=True,
        gpu_memory_utilization=0.5,
        free_cache_engine=True,
        engine_kwargs={"vllm": {}},
        prompt_length=20,
        response_length=30,
        repetition_penalty=1.0,
        ignore_eos=False,
        seed=42,
    )
    return SimpleNamespace(**values | changes)


def model(**changes):
    values = dict(lora={}, lora_rank=8, processor=None, hf_config=SimpleNamespace())
    return SimpleNamespace(**values | changes)


def options(given, prompt_tokens=5, **changes):
    return request_options(rollout(**changes), [1] * prompt_tokens, given, CONTEXT)


# --- Refusals -------------------------------------------------------------------------------------


def test_verls_defaults_are_taken():
    assert problems(rollout(), model()) == []
    # Megatron's way to say it.
    assert problems(rollout(), model(lora={"rank": 8}, lora_rank=0)) == []


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"tensor_model_parallel_size": 2}, "rollout.tensor_model_parallel_size=2"),
        ({"data_parallel_size": 2}, "rollout.data_parallel_size=2"),
        ({"pipeline_model_parallel_size": 2}, "rollout.pipeline_model_parallel_size=2"),
        ({"expert_parallel_size": 2}, "rollout.expert_parallel_size=2"),
        (
            {"checkpoint_engine": SimpleNamespace(backend="nccl")},
            "rollout.checkpoint_engine.backend='nccl'",
        ),
        ({"dtype": "float16"}, "rollout.dtype='float16' is not one of auto, bfloat16, float32"),
        ({"logprobs_mode": "raw_logits"}, "rollout.logprobs_mode='raw_logits'"),
        ({"scheduling_policy": "priority"}, "rollout.scheduling_policy='priority'"),
        ({"quantization": "fp8"}, "rollout.quantization=fp8"),
        ({"qat": {"enable": True}}, "rollout.qat.enable=True"),
        (
            {"mtp": SimpleNamespace(enable=True, enable_rollout=True)},
            "rollout.mtp.enable_rollout=True",
        ),
        ({"enable_rollout_routing_replay": True}, "rollout.enable_rollout_routing_replay=True"),
        ({"prometheus": SimpleNamespace(enable=True)}, "rollout.prometheus.enable=True"),
        ({"profiler": SimpleNamespace(enable=True)}, "rollout.profiler.enable=True"),
    ],
)
def test_a_rollout_that_cannot_be_honoured_is_refused(changed, problem):
    (found,) = problems(rollout(**changed), model())
    assert problem in found


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"lora_rank": 0}, "model.lora_rank=0"),
        ({"lora": {"merge": True}}, "model.lora.merge=True"),
        ({"hf_config": SimpleNamespace(quantization_config={})}, "quantised"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused(changed, problem):
    (found,) = problems(rollout(), model(**changed))
    assert problem in found


def test_without_verl_the_import_says_what_is_missing(monkeypatch):
    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name == "verl":
                raise ModuleNotFoundError("No module named 'verl'", name="verl")

    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "dorad.verl", raising=False)
    with pytest.raises(ImportError, match=r"needs the package verl.*pip install 'dorad\[verl\]'"):
        import dorad.verl  # noqa: F401


def test_refusals_reach_another_process_whole():
    error = pickle.loads(pickle.dumps(UnsupportedError(["one", "two"])))
    assert error.problems == ["one", "two"]
    assert str(error) == str(UnsupportedError(["one", "two"]))


# --- The server's settings ------------------------------------------------------------------------


def test_a_server_gets_verls_limits_and_the_users_settings():
    own = {"engine": {"kv_bytes": "8GiB", "threads": None}, "model": {"max_context": 50}}
    values = server_settings(rollout(engine_kwargs={"dorad": own}, max_model_len=80), "cuda")
    assert values["model.device"] == "cuda" and values["model.compute_dtype"] == "bf16"
    assert values["memory.vram_limit"] == 0.5 and values["engine.max_running_sequences"] == 256
    assert values["engine.prefix_cache"] is values["memory.host_weights"] is True
    assert values["engine.kv_bytes"] == "8GiB" and "engine.threads" not in values
    assert values["model.max_context"] == 50


def test_the_limit_of_images_is_the_servers():
    assert server_settings(rollout(limit_images=3), "cpu")["limits.max_images"] == 3
    assert "limits.max_images" not in server_settings(rollout(), "cpu")


def test_a_server_on_the_cpu_has_no_limit_of_a_gpu():
    values = server_settings(rollout(dtype="float32", enable_prefix_caching=False), "cpu")
    assert values["model.compute_dtype"] == "fp32" and values["engine.prefix_cache"] is False
    assert not [name for name in values if name.startswith("memory.")]
    assert values["model.max_context"] == 0


# --- Requests -------------------------------------------------------------------------------------


def test_what_verls_agent_loop_sends_becomes_a_request():
    given = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.1}
    found = options(given | {"logprobs": True, "stop_token_ids": [7]})
    assert found == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": None,
        "repetition_penalty": 1.1,
        "stop_token_ids": [7],
        "ignore_eos": False,
        "max_tokens": 30,
        "logprobs": "scaled",
    }


def test_absent_parameters_are_the_rollouts():
    found = options({"min_p": None}, repetition_penalty=1.2, ignore_eos=True)
    assert found["repetition_penalty"] == 1.2 and found["ignore_eos"] is True
    assert found["temperature"] == 1.0 and "min_p" not in found and "logprobs" not in found
    assert options({"top_k": 20})["top_k"] == 20


@pytest.mark.parametrize(
    ("mode", "temperature", "expected"),
    [
        ("processed_logprobs", 0.7, "scaled"),
        ("raw_logprobs", 0.7, "raw"),
        ("processed_logprobs", 0, "raw"),
        (None, 1.0, "scaled"),
    ],
)
def test_logprobs_are_those_that_the_trainer_computes(mode, temperature, expected):
    given = {"temperature": temperature, "logprobs": True}
    assert options(given, logprobs_mode=mode)["logprobs"] == expected
    assert "logprobs" not in options(given | {"logprobs": False})


@pytest.mark.parametrize(
    ("given", "prompt_tokens", "expected"),
    [
        ({}, 5, 30),  # the response's length
        ({}, 35, 15),  # what earlier turns have left
        ({}, 60, 1),
        ({"max_tokens": 12}, 5, 12),
        ({"max_new_tokens": 12}, 5, 12),
        ({"max_tokens": 500}, 40, 60),  # the context
        ({"max_tokens": 0}, 5, 1),
    ],
)
def test_answers_end_at_verls_limits(given, prompt_tokens, expected):
    assert options(given, prompt_tokens)["max_tokens"] == expected


def test_a_prompt_as_long_as_the_context_is_refused():
    with pytest.raises(ValueError, match="100 tokens leaves no room in a context of 100"):
        options({}, prompt_tokens=100)


def test_unknown_parameters_are_refused_by_name():
    with pytest.raises(ValueError, match="sampling parameters guided_json, stop: dorad knows"):
        options({"stop": ["\n"], "guided_json": "{}", "top_p": 1.0})
    with pytest.raises(ValueError, match="n=2"):
        options({"n": 2})
    assert options({"n": 1, "stop": None})


# --- The gate -------------------------------------------------------------------------------------


async def settle():
    """Lets all tasks go as far as they can."""
    for _ in range(20):
        await asyncio.sleep(0)


class Requests:
    """Each stays inside until `end`."""

    def __init__(self, gate):
        self.gate = gate
        self.ends = {}
        self.answers = {}

    def start(self, name):
        self.ends[name] = asyncio.Event()
        return asyncio.create_task(self._run(name))

    async def _run(self, name):
        async with self.gate.entered(name) as entered:
            self.answers[name] = entered
            if entered:
                await self.ends[name].wait()


def test_an_open_gate_lets_in_and_knows_who_is_in():
    async def main():
        gate = Gate()
        requests = Requests(gate)
        tasks = [requests.start("a"), requests.start("a2")]
        await settle()
        assert gate.inside == ["a", "a2"]
        emptied = asyncio.create_task(gate.emptied())
        requests.ends["a"].set()
        await settle()
        assert gate.inside == ["a2"] and not emptied.done()
        tasks[1].cancel()
        await emptied
        assert gate.inside == []

    asyncio.run(main())


def test_a_closed_gate_holds_requests_until_it_opens():
    async def main():
        gate = Gate()
        requests = Requests(gate)
        await gate.close(refuse=False)
        requests.start("a")
        await settle()
        assert requests.answers == {} and gate.inside == []
        await gate.open()
        await settle()
        assert requests.answers == {"a": True} and gate.inside == ["a"]

    asyncio.run(main())


def test_a_refusing_gate_holds_nobody():
    async def main():
        gate = Gate()
        requests = Requests(gate)
        await gate.close(refuse=False)
        held = requests.start("held")
        await settle()
        await gate.close(refuse=True)
        await asyncio.gather(held, requests.start("late"))
        assert requests.answers == {"held": False, "late": False} and gate.inside == []
        # An ordinary abort holds again, and an opened gate refuses nobody.
        await gate.close(refuse=False)
        requests.start("third")
        await settle()
        assert "third" not in requests.answers
        await gate.open()
        await settle()
        assert requests.answers["third"] is True

    asyncio.run(main())
