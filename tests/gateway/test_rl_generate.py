"""/inference/v1/generate, and completions as RL libraries send them."""

from typing import get_args

import httpx
import pytest
from dorad.gateway.rl.generate import TokensResponse
from dorad.types import LogprobMode
from lib.gateway import running_gateway

IDS = [1, 40, 77, 120, 33]
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 12, "seed": 11}


@pytest.fixture(scope="module")
def adapter(rl_client, adapter_root):
    return rl_client.publish("generates", path=adapter_root / "dora-0").name


def generate(rl, params, **fields):
    body = {"token_ids": IDS, "sampling_params": {**SAMPLING, **params}, **fields}
    answer = rl.post("/inference/v1/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ids_of(sample):
    return sample.token_ids.tolist()


def test_tokens_and_logprobs_are_those_of_the_grpc_client(rl, rl_client, adapter):
    answer = generate(rl, {"logprobs": 1, "n": 2}, model=adapter, request_id="mine")
    TokensResponse.model_validate(answer)
    samples = rl_client.generate(
        IDS, adapter=adapter, logprobs="raw", top_logprobs=1, n=2, **SAMPLING
    )
    assert answer["request_id"] == "mine"
    for choice, sample in zip(answer["choices"], samples, strict=True):
        assert choice["token_ids"] == ids_of(sample)
        assert choice["finish_reason"] == sample.finish_reason.value
        assert choice["dorad"]["adapter"] == adapter
        for i, entry in enumerate(choice["logprobs"]["content"]):
            assert entry["token"] == f"token_id:{sample.token_ids[i]}"
            assert entry["logprob"] == float(sample.logprobs[i])
            (top,) = entry["top_logprobs"]
            assert top["token"] == f"token_id:{sample.top_logprobs.token_ids[i][0]}"
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    assert answer["usage"]["completion_tokens"] == sum(len(s.token_ids) for s in samples)


def test_what_skyrl_sends_is_understood(rl, rl_client, adapter):
    """RemoteInferenceClient.sample."""
    params = {"n": 1, "logprobs": 0, "output_kind": 2, "prompt_logprobs": 2, "stop_token_ids": [7]}
    answer = generate(rl, params, model=adapter, cache_salt="v3")
    scores = rl_client.score([IDS], [adapter], top_k=2)
    rows = answer["prompt_logprobs"]
    assert rows[0] is None and len(rows) == len(IDS)
    for i, row in enumerate(rows[1:], 1):
        assert row[str(IDS[i])]["logprob"] == float(scores[0, 0][i])
        assert len(row) in (2, 3)
    assert answer["choices"][0]["logprobs"]["content"]


def test_what_verifiers_sends_is_understood(rl, rl_client, adapter):
    """renderers.client.generate, with the fields of TrainClient."""
    params = {
        "stop_token_ids": [2, 7],
        "logprobs": 1,
        "skip_special_tokens": False,
        "routed_experts_prompt_start": 3,
        "min_tokens": 2,
    }
    answer = generate(rl, params, model=adapter, cache_salt="0", priority=2)
    (sample,) = rl_client.generate(
        IDS, adapter=adapter, min_tokens=2, stop_token_ids=[2, 7], **SAMPLING
    )
    assert answer["choices"][0]["token_ids"] == ids_of(sample)


def test_without_logprobs_there_are_none(rl):
    answer = generate(rl, {}, return_token_ids=True)
    assert answer["choices"][0]["logprobs"] is None and answer["prompt_logprobs"] is None
    assert answer["prompt_token_ids"] == IDS


def test_without_max_tokens_an_answer_ends_where_it_stops(rl):
    """verifiers sends it only if its user does."""
    params = {"stop_token_ids": [7], "logit_bias": {"7": 100}, "min_tokens": 40}
    body = {"token_ids": IDS, "sampling_params": params, "output_mode": "tokens"}
    (choice,) = rl.post("/inference/v1/generate", json=body).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert len(choice["token_ids"]) == 41 and choice["token_ids"][-1] == 7


def test_a_stop_string_ends_the_tokens(rl, rl_client):
    samples = {**SAMPLING, "n": 8}
    answer = rl.post("/v1/completions", json={"prompt": IDS, **samples}).json()
    texts = [choice["text"] for choice in answer["choices"]]
    text = max(texts, key=len)
    choice = generate(rl, {**samples, "stop": [text[1:3]]})["choices"][texts.index(text)]
    assert choice["stop_reason"] == text[1:3] and choice["finish_reason"] == "stop"
    assert len(choice["token_ids"]) < SAMPLING["max_tokens"]


@pytest.mark.parametrize("mode", get_args(LogprobMode))
def test_a_request_chooses_its_logprobs(rl, rl_client, adapter, mode):
    answer = generate(rl, {"logprobs": 0, "logprobs_mode": mode}, model=adapter)
    (sample,) = rl_client.generate(IDS, adapter=adapter, logprobs=mode, **SAMPLING)
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == sample.logprobs.tolist()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"features": {}}, "features"),
        ({"content_parts": [{"type": "image_url", "url": "x"}]}, "content_parts"),
        ({"stream": True}, "stream"),
        ({"token_ids": []}, "token_ids"),
        ({"sampling_params": {"output_kind": 1}}, "output_kind"),
        ({"sampling_params": {"echo": True}}, "sampling_params.echo"),
        ({"sampling_params": {"prompt": "x"}}, "sampling_params.prompt"),
        ({"sampling_params": {"stream": True}}, "sampling_params.stream"),
        ({"sampling_params": {"length_penalty": 2}}, "length_penalty"),
        ({"sampling_params": {"unheard": 1}}, "unheard"),
        ({"sampling_params": {"top_p": 3}}, "top_p"),
        ({"sampling_params": 3}, "sampling_params"),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(rl, fields, param):
    answer = rl.post("/inference/v1/generate", json={"token_ids": IDS, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "fields", [{"features": None, "stream": False, "kv_transfer_params": None}]
)
def test_what_asks_for_nothing_is_taken(rl, fields):
    generate(rl, {"output_kind": 0, "detokenize": False}, **fields)


# --- Completions ----------------------------------------------------------------------------------


def test_without_a_model_it_is_the_base(rl, rl_client):
    body = {"prompt": IDS, "return_token_ids": True, **SAMPLING}
    answer = rl.post("/v1/completions", json=body).json()
    base = rl_client.info().model.name
    assert answer["model"] == base
    (sample,) = rl_client.generate(IDS, **SAMPLING)
    assert answer["choices"][0]["token_ids"] == ids_of(sample)


def test_a_whole_batch_is_one_request(rl):
    body = {"prompt": [IDS] * 150, "n": 2, "max_tokens": 1, "return_token_ids": True}
    answer = rl.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == 300


def test_options_choose_the_logprobs_and_the_models_id(
    rl_server, rl_client, slow_folder, adapter, tmp_path
):
    arguments = ["--rl", "--logprobs-mode", "processed", "--served-model-name", "Qwen/Qwen3"]
    with (
        running_gateway(
            rl_server.grpc, *arguments, "--tokenizer", slow_folder, scratch=tmp_path
        ) as gateway,
        httpx.Client(base_url=gateway.url, timeout=60) as http,
    ):
        names = [row["id"] for row in http.get("/v1/models").json()["data"]]
        assert names[0] == "Qwen/Qwen3"
        info = http.get("/server_info").json()["vllm_config"]["model_config"]
        assert (info["logprobs_mode"], info["model"]) == ("processed_logprobs", "Qwen/Qwen3")
        body = {"prompt": IDS, "logprobs": 0, **SAMPLING}
        for model in ("Qwen/Qwen3", adapter):
            answer = http.post("/v1/completions", json={"model": model, **body}).json()
            (sample,) = rl_client.generate(
                IDS, adapter=None if "/" in model else model, logprobs="processed", **SAMPLING
            )
            found = answer["choices"][0]["logprobs"]["token_logprobs"]
            assert found == sample.logprobs.tolist() and answer["model"] == model
        chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "max_tokens": 4}
        greedy = {"model": "Qwen/Qwen3", **chat, "temperature": 0}
        content = http.post("/v1/chat/completions", json=greedy).json()["choices"][0]["logprobs"]
        assert {entry["logprob"] for entry in content["content"]} == {0}
        # AReaL's score request: what was not sampled is raw.
        score = {"prompt": IDS, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
        answer = http.post("/v1/completions", json={**score, "prompt_logprobs": 1}).json()
        rows = answer["choices"][0]["prompt_logprobs"]
        wanted = rl_client.score([IDS])[0, 0].tolist()[1:]
        assert [next(iter(row.values()))["logprob"] for row in rows[1:]] == wanted
