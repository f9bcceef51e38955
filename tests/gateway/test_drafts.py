"""Guesses at answers: OpenAI's `prediction`, and the extensions `drafts` and `ngram_drafts`."""

import httpx
import numpy as np
import pytest

MESSAGES = [{"role": "user", "content": "Which harbour?"}]
IDS = [1, 40, 77, 120, 33]
SAMPLING = {"max_tokens": 24, "seed": 11, "ignore_eos": True}
NONE = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}


def post(http: httpx.Client, path: str, base: str, **fields) -> dict:
    body = {"model": base, "return_token_ids": True, **SAMPLING, **fields}
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat(http: httpx.Client, base: str, **fields) -> dict:
    return post(http, "/v1/chat/completions", base, messages=MESSAGES, **fields)


def complete(http: httpx.Client, base: str, **fields) -> dict:
    return post(http, "/v1/completions", base, prompt=IDS, **fields)


def ids_of(answer: dict) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


def details(answer: dict) -> dict:
    return answer["usage"]["completion_tokens_details"]


def sent(fake) -> list[list[int]]:
    (call,) = fake.generate_calls
    return [np.frombuffer(draft.token_ids, "<i4").tolist() for draft in call.drafts]


@pytest.mark.parametrize(
    "content",
    ["Grüße from it", [{"type": "text", "text": "Grüße "}, {"type": "text", "text": "from it"}]],
)
def test_a_prediction_is_offered_for_every_choice(fake, fake_http, text, content):
    chat(fake_http, "fake-model", n=3, prediction={"type": "content", "content": content})
    assert sent(fake) == [text.encode("Grüße from it", special_tokens=False)] * 3


def test_without_one_nothing_is_offered(fake, fake_http):
    assert details(chat(fake_http, "fake-model")) == NONE
    assert sent(fake) == [] and not fake.generate_calls[0].HasField("ngram_drafts")


def steady(text) -> int:
    """A token whose repetition is encoded as itself."""
    return next(
        i
        for i in range(3, 2000)
        if text.encode(text.decode([i] * 24), special_tokens=False) == [i] * 24
    )


def test_a_right_prediction_changes_the_counts_alone(http, base, text):
    """The model may say one word only, so that the text has the tokens of the answer."""
    word = steady(text)
    only = {"allowed_token_ids": [word]}
    plain = chat(http, base, **only)
    assert ids_of(plain) == [[word] * 24] and details(plain) == NONE
    said = plain["choices"][0]["message"]["content"]
    predicted = chat(http, base, **only, prediction={"type": "content", "content": said})
    assert predicted["choices"] == plain["choices"]
    counts = details(predicted)
    assert counts["accepted_prediction_tokens"] > 12 and counts["rejected_prediction_tokens"] == 0
    usage = predicted["usage"]
    assert usage["completion_tokens"] == 24 == plain["usage"]["completion_tokens"]


def test_wrong_guesses_change_the_counts_alone(http, base):
    plain = complete(http, base, n=2)
    # Tokens are guessed after a right one.
    wrong = [[ids[0], ids[1] + 1, *ids[2:]] for ids in ids_of(plain)]
    drafted = complete(http, base, n=2, drafts=wrong)
    assert drafted["choices"] == plain["choices"]
    assert details(drafted)["rejected_prediction_tokens"] >= 2


@pytest.mark.parametrize("stream", [False, True])
def test_drafts_of_a_completion_are_its_choices(client, http, base, stream):
    """Two prompts with two choices each; the last choice has none."""
    prompts = {"prompt": [IDS, IDS[::-1]], "n": 2, **SAMPLING}
    plain = post(http, "/v1/completions", base, **prompts)
    drafts = {"drafts": ids_of(plain)[:3]}
    if not stream:
        drafted = post(http, "/v1/completions", base, **prompts, **drafts)
        assert drafted["choices"] == plain["choices"]
        accepted = details(drafted)["accepted_prediction_tokens"]
    else:
        found = [[] for _ in range(4)]
        for event in client.completions.create(
            model=base,
            **{name: value for name, value in prompts.items() if name != "ignore_eos"},
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True, "ignore_eos": True, **drafts},
        ):
            for choice in event.choices:
                found[choice.index] += choice.token_ids
        assert found == ids_of(plain)
        accepted = event.usage.completion_tokens_details.accepted_prediction_tokens
    assert 3 * 12 < accepted <= 3 * 24


def test_ngrams_guess_too(http, base, text):
    word = steady(text)
    answer = complete(http, base, allowed_token_ids=[word], ngram_drafts=True)
    assert ids_of(answer) == [[word] * 24]
    assert details(answer)["accepted_prediction_tokens"] > 0


def test_the_route_of_rl_libraries_takes_drafts(rl):
    def generate(**params):
        body = {"token_ids": IDS, "sampling_params": {**SAMPLING, "n": 2, **params}}
        answer = rl.post("/inference/v1/generate", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    plain = generate()
    drafted = generate(drafts=ids_of(plain))
    assert drafted["choices"] == plain["choices"]
    assert details(drafted)["accepted_prediction_tokens"] > 24


def test_the_open_inference_protocol_takes_drafts(fake, fake_http):
    tensor = {"name": "input_ids", "datatype": "INT64", "shape": [2], "data": [5, 6]}
    body = {"inputs": [tensor], "parameters": {"drafts": [[7, 8]], "max_tokens": 2}}
    answer = fake_http.post("/v2/models/fake-model/infer", json=body)
    assert answer.status_code == 200, answer.text
    assert sent(fake) == [[7, 8]]


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prediction": "text"}, "FIELD_INVALID", "prediction"),
        ({"prediction": {"type": "content"}}, "FIELD_MISSING", "prediction.content"),
        (
            {"prediction": {"type": "file", "content": "x"}},
            "FIELD_INVALID",
            "prediction.type",
        ),
        (
            {"prediction": {"type": "content", "content": [{"type": "image_url"}]}},
            "FIELD_INVALID",
            "prediction.content[0].type",
        ),
        (
            {"prediction": {"type": "content", "content": "x"}, "drafts": [[1]]},
            "FIELD_INVALID",
            "prediction",
        ),
        ({"drafts": [1]}, "FIELD_INVALID", "drafts[0]"),
        ({"drafts": [[1], [2]]}, "DRAFTS_TOO_MANY", "drafts"),
        ({"drafts": [[1, 999999]]}, "TOKEN_ID_OUT_OF_RANGE", "drafts"),
        ({"drafts": [[5] * (1 << 18) + [5]]}, "DRAFTS_TOO_MANY", "drafts"),
    ],
)
def test_bad_guesses_are_400_and_named(http, base, fields, code, param):
    answer = http.post("/v1/chat/completions", json={"model": base, "messages": MESSAGES, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, param)


def test_a_completion_has_no_prediction(http, base):
    """As OpenAI's and vLLM's: accepted, without effect."""
    assert details(complete(http, base, prediction={"type": "content", "content": "x"})) == NONE
