"""Log-probabilities of prompts, in vLLM's shape, and truncated prompts."""

import math

import pytest

IDS = [1, 40, 77, 120, 33]
CHAT = {"messages": [{"role": "user", "content": "which harbour?"}], "seed": 3, "max_tokens": 4}


def completion(http, base, **fields):
    body = {"model": base, "prompt": IDS, "max_tokens": 4, "seed": 3, **fields}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def expected(grpc_client, text, ids, top, adapter=None):
    """vLLM's rows: the prompt's token, then the most likely ones."""
    scored = grpc_client.score([ids], [adapter], top_k=top or None)
    rows = [None]
    for position in range(1, len(ids)):
        ranks = {}
        if top:
            alternatives = scored.top_logprobs[0][0]
            pairs = zip(
                alternatives.token_ids[position].tolist(),
                alternatives.logprobs[position].tolist(),
                strict=True,
            )
            ranks = {i: (p, rank) for rank, (i, p) in enumerate(pairs, 1)}
        own = (float(scored[0, 0][position]), top + 1)
        row = {ids[position]: ranks.get(ids[position], own), **ranks}
        rows.append(
            {
                str(i): {"logprob": p, "rank": rank, "decoded_token": named(text, i)}
                for i, (p, rank) in row.items()
            }
        )
    return rows


def named(text, token_id):
    raw = text.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


@pytest.mark.parametrize("top", [0, 1, 3])
@pytest.mark.parametrize("stop", [[], ["absent"]])
def test_every_choice_of_a_completion_has_those_of_its_prompt(
    http, base, grpc_client, text, top, stop
):
    prompts = [IDS, IDS[::-1]]
    answer = completion(http, base, prompt=prompts, n=2, prompt_logprobs=top, stop=stop)
    rows = [expected(grpc_client, text, ids, top) for ids in prompts]
    assert [c["prompt_logprobs"] for c in answer["choices"]] == [rows[0]] * 2 + [rows[1]] * 2
    assert all(c["logprobs"] is None for c in answer["choices"])
    assert next(iter(answer["choices"][0]["prompt_logprobs"][2])) == str(IDS[2])
    plain = completion(http, base, prompt=prompts, n=2, stop=stop)
    assert [c["text"] for c in plain["choices"]] == [c["text"] for c in answer["choices"]]
    assert "prompt_logprobs" not in plain["choices"][0]


@pytest.mark.parametrize(("logprobs", "top"), [(1, 3), (3, 1), (0, 2)])
def test_prompt_and_answer_have_their_own_numbers_of_alternatives(
    http, base, grpc_client, text, logprobs, top
):
    answer = completion(http, base, logprobs=logprobs, prompt_logprobs=top, logprobs_mode="raw")
    (choice,) = answer["choices"]
    assert choice["prompt_logprobs"] == expected(grpc_client, text, IDS, top)
    alone = completion(http, base, logprobs=logprobs)["choices"][0]
    assert choice["logprobs"] == alone["logprobs"]


def test_a_chat_has_those_of_its_prompt(http, grpc_client, text):
    body = {**CHAT, "model": "dora", "prompt_logprobs": 2, "return_token_ids": True}
    answer = http.post("/v1/chat/completions", json=body).json()
    ids = answer["prompt_token_ids"]
    assert answer["prompt_logprobs"] == expected(grpc_client, text, ids, 2, "dora")
    assert answer["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("logprobs", [None, 1])
def test_an_echo_alone_has_them_too(http, base, grpc_client, text, logprobs):
    options = {"logprobs": logprobs, "prompt_logprobs": 2}
    answer = completion(http, base, echo=True, max_tokens=0, n=2, **options)
    rows = expected(grpc_client, text, IDS, 2)
    assert [c["prompt_logprobs"] for c in answer["choices"]] == [rows] * 2
    if logprobs is not None:
        alone = completion(http, base, echo=True, max_tokens=0, logprobs=logprobs)
        assert answer["choices"][0]["logprobs"] == alone["choices"][0]["logprobs"]


def test_streams_have_none(http, base):
    for route, prompt in (("completions", {"prompt": IDS}), ("chat/completions", CHAT)):
        body = {"model": base, **prompt, "stream": True, "prompt_logprobs": 1}
        answer = http.post(f"/v1/{route}", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "FIELD_UNSUPPORTED"
        assert answer.json()["error"]["param"] == "prompt_logprobs"


@pytest.mark.parametrize("fields", [{"prompt_logprobs": -1}, {"truncate_prompt_tokens": 0}])
def test_other_numbers_are_refused(http, base, fields):
    answer = http.post("/v1/completions", json={"model": base, "prompt": IDS, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in fields


def test_a_truncated_prompt_is_its_end(http, base, grpc_client, text):
    options = {"return_token_ids": True, "prompt_logprobs": 1, "echo": True, "logprobs": 1}
    answer = completion(http, base, truncate_prompt_tokens=3, **options)
    end = completion(http, base, prompt=IDS[-3:], **options)
    assert answer["choices"] == end["choices"] and answer["usage"] == end["usage"]
    assert answer["choices"][0]["prompt_token_ids"] == IDS[-3:]
    assert completion(http, base, truncate_prompt_tokens=99)["usage"]["prompt_tokens"] == len(IDS)
    chat = {**CHAT, "model": base, "return_token_ids": True}
    whole = http.post("/v1/chat/completions", json=chat).json()["prompt_token_ids"]
    kept = http.post("/v1/chat/completions", json={**chat, "truncate_prompt_tokens": 4}).json()
    assert kept["prompt_token_ids"] == whole[-4:] and kept["usage"]["prompt_tokens"] == 4


def test_as_much_of_a_prompt_as_fits_is_kept(http, base, grpc_client):
    context = grpc_client.info().model.context_length
    answer = completion(http, base, prompt=[40] * (context + 9), truncate_prompt_tokens=-1)
    assert answer["usage"]["prompt_tokens"] == context - 4
    assert answer["usage"]["completion_tokens"] <= 4


def test_without_a_tokenizer_tokens_have_no_text(ids_only, base):
    body = {"model": base, "prompt": IDS, "max_tokens": 1, "prompt_logprobs": 1}
    answer = ids_only.post("/v1/completions", json=body).json()
    rows = answer["choices"][0]["prompt_logprobs"]
    assert rows[0] is None and len(rows) == len(IDS)
    own = rows[1][str(IDS[1])]
    assert own["decoded_token"] is None and math.isfinite(own["logprob"])
