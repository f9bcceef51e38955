"""/v1/completions through the official client, compared with the gRPC client."""

import itertools
import json
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
from lib.server import wait_until

IDS = [1, 40, 77, 120, 33]
SAMPLED = {"max_tokens": 24, "temperature": 1.0, "seed": 11}
MODES = ["raw", "processed"]


def grpc_samples(grpc_client, prompt, **options):
    return grpc_client.generate(prompt, **{**SAMPLED, **options})


def extra(**fields):
    return {"extra_body": fields}


@pytest.mark.parametrize("model", [None, "dora", "lora@1"])
def test_tokens_and_logprobs_are_those_of_the_grpc_client(client, grpc_client, base, text, model):
    answer = client.completions.create(
        model=model or base, prompt=IDS, logprobs=3, **SAMPLED, **extra(return_token_ids=True)
    )
    (sample,) = grpc_samples(grpc_client, IDS, adapter=model, logprobs="raw", top_logprobs=3)
    (choice,) = answer.choices
    assert choice.token_ids == sample.token_ids.tolist()
    assert choice.prompt_token_ids == IDS
    assert choice.logprobs.token_logprobs == sample.logprobs.tolist()
    ids = [i for i in sample.token_ids if i != 2]
    assert choice.text == text.decode(ids)
    for row, top in zip(choice.logprobs.top_logprobs, sample.top_logprobs.logprobs, strict=True):
        assert len(row) in (3, 4) and set(top.tolist()) <= set(row.values())
    assert answer.usage.prompt_tokens == len(IDS)
    assert answer.usage.completion_tokens == len(sample.token_ids)
    assert choice.finish_reason == sample.finish_reason.value


def version_of(span):
    return {"adapter": span.adapter, "version": span.version, "digest": span.digest}


@pytest.mark.parametrize("model", ["dora", "lora@1"])
def test_a_choice_names_the_version_that_made_its_tokens(client, grpc_client, model):
    answer = client.completions.create(model=model, prompt=IDS, n=2, **SAMPLED)
    samples = grpc_samples(grpc_client, IDS, adapter=model, n=2)
    for choice, sample in zip(answer.choices, samples, strict=True):
        (span,) = sample.spans
        shown = {**version_of(span), "begin": 0, "end": len(sample.token_ids)}
        assert choice.dorad == {**version_of(span), "spans": [shown]}


def test_the_base_model_has_no_version(client, base):
    (choice,) = client.completions.create(
        model=base, prompt=IDS, max_tokens=3, temperature=0, **extra(ignore_eos=True)
    ).choices
    none = {"adapter": None, "version": None, "digest": None}
    assert choice.dorad == {**none, "spans": [{**none, "begin": 0, "end": 3}]}


def test_an_echo_alone_names_the_version_that_scored_it(client, grpc_client):
    options = {"model": "dora", "prompt": IDS, "echo": True, "max_tokens": 0}
    version = grpc_client.score([IDS], ["dora"]).versions[0]
    for streamed in (False, True):
        answer = client.completions.create(**options, logprobs=0, stream=streamed)
        (choice,) = [c for e in answer for c in e.choices] if streamed else answer.choices
        assert choice.dorad == {**version_of(version), "spans": []}
    assert not hasattr(client.completions.create(**options).choices[0], "dorad")


@pytest.mark.parametrize("stop", [None, "never in the text"])
def test_spans_of_a_stream_are_those_of_its_tokens(client, stop):
    """Also of tokens that were held back."""
    options = {"model": "dora", "prompt": IDS, "stop": stop, **SAMPLED}
    (whole,) = client.completions.create(**options).choices
    count = 0
    for event in client.completions.create(**options, stream=True, **extra(return_token_ids=True)):
        (choice,) = event.choices
        shown = choice.dorad
        assert {**shown, "spans": 0} == {**whole.dorad, "spans": 0}
        spans = [(span["begin"], span["end"]) for span in shown["spans"]]
        new = len(choice.token_ids)
        assert spans == ([(count, count + new)] if new else [])
        count += new
    assert count == whole.dorad["spans"][0]["end"]


def test_an_aborted_choice_says_so(client, grpc_client, base):
    grpc_client.pause("keep")
    try:
        with ThreadPoolExecutor(1) as background:
            answer = background.submit(
                client.completions.create, model=base, prompt=IDS, max_tokens=8
            )
            wait_until(lambda: grpc_client.abort(all=True), what="the request")
    finally:
        grpc_client.resume()
    assert answer.result().choices[0].finish_reason == "abort"


def test_the_base_and_an_adapter_answer_differently(client, base):
    texts = [
        client.completions.create(model=m, prompt=IDS, max_tokens=16, temperature=0).choices[0].text
        for m in (base, "dora", "lora")
    ]
    assert len(set(texts)) == 3


def test_tokens_of_logprobs_can_be_named_by_id(client, grpc_client, base):
    answer = client.completions.create(
        model=base, prompt=IDS, logprobs=2, **SAMPLED, **extra(return_tokens_as_token_ids=True)
    )
    (sample,) = grpc_samples(grpc_client, IDS, logprobs="raw", top_logprobs=2)
    found = answer.choices[0].logprobs
    assert found.tokens == [f"token_id:{i}" for i in sample.token_ids]
    top = sample.top_logprobs
    for t, row in enumerate(found.top_logprobs):
        wanted = dict(zip(top.token_ids[t].tolist(), top.logprobs[t].tolist(), strict=True))
        wanted.setdefault(int(sample.token_ids[t]), float(sample.logprobs[t]))
        assert row == {f"token_id:{i}": p for i, p in wanted.items()}


def test_streamed_pieces_join_to_the_whole_answer(client, base):
    options = {"model": base, "prompt": IDS, "logprobs": 1, "n": 3, **SAMPLED}
    whole = client.completions.create(**options, **extra(return_token_ids=True))
    parts = {i: [] for i in range(3)}
    last = None
    for event in client.completions.create(
        **options,
        stream=True,
        stream_options={"include_usage": True},
        **extra(return_token_ids=True),
    ):
        last = event
        for choice in event.choices:
            parts[choice.index].append(choice)
    assert not last.choices and last.usage == whole.usage
    for choice, pieces in zip(whole.choices, parts.values(), strict=True):
        assert "".join(p.text for p in pieces) == choice.text
        assert list(itertools.chain(*(p.token_ids for p in pieces))) == choice.token_ids
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = list(itertools.chain(*(getattr(p.logprobs, name) for p in pieces)))
            assert joined == getattr(choice.logprobs, name)
        reasons = [p.finish_reason for p in pieces]
        assert reasons[:-1] == [None] * (len(pieces) - 1) and reasons[-1] == choice.finish_reason


def test_n_choices_of_several_prompts_are_numbered_prompt_by_prompt(client, grpc_client, base):
    prompts = [IDS, [1, 200, 9]]
    answer = client.completions.create(
        model=base, prompt=prompts, n=2, **SAMPLED, **extra(return_token_ids=True)
    )
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    wanted = [
        sample.token_ids.tolist() for p in prompts for sample in grpc_samples(grpc_client, p, n=2)
    ]
    assert [c.token_ids for c in answer.choices] == wanted
    assert answer.usage.prompt_tokens == 8


@pytest.mark.parametrize("mode", MODES)
def test_logprobs_are_of_the_mode_that_is_asked_for(client, grpc_client, base, mode):
    options = {**SAMPLED, "temperature": 0.7, "top_p": 0.8}
    answer = client.completions.create(
        model=base, prompt=IDS, logprobs=0, **options, **extra(logprobs_mode=mode)
    )
    (sample,) = grpc_client.generate(IDS, logprobs=mode, **options)
    assert answer.choices[0].logprobs.token_logprobs == sample.logprobs.tolist()
    raw, processed = (grpc_client.generate(IDS, logprobs=m, **options)[0] for m in MODES)
    assert raw.logprobs.tolist() != processed.logprobs.tolist()


def test_logprobs_true_are_those_of_one(http, base):
    """SkyRL's Tinker server sends true."""
    body = {"model": base, "prompt": IDS, **SAMPLED}
    one, true, false, none = (
        http.post("/v1/completions", json={**body, **fields}).json()["choices"]
        for fields in ({"logprobs": 1}, {"logprobs": True}, {"logprobs": False}, {})
    )
    assert one == true and one[0]["logprobs"] is not None
    assert false == none and none[0]["logprobs"] is None


def test_without_rl_a_request_names_its_model(http):
    error = http.post("/v1/completions", json={"prompt": IDS}).json()["error"]
    assert (error["code"], error["param"]) == ("FIELD_MISSING", "model")


def test_greedy_tokens_are_certain_where_logprobs_are_processed(client, base):
    answer = client.completions.create(
        model=base, prompt=IDS, logprobs=3, temperature=0, max_tokens=4,
        **extra(logprobs_mode="processed", return_tokens_as_token_ids=True),
    )  # fmt: skip
    found = answer.choices[0].logprobs
    assert found.token_logprobs == [0] * 4
    for token, row in zip(found.tokens, found.top_logprobs, strict=True):
        assert row.pop(token) == 0 and set(row.values()) <= {-9999}  # JSON has no infinity.


def test_an_echo_has_no_processed_logprobs(http, base):
    body = {"model": base, "prompt": IDS, "echo": True, "logprobs_mode": "processed"}
    error = http.post("/v1/completions", json={**body, "logprobs": 0}).json()["error"]
    assert (error["code"], error["param"]) == ("FIELD_UNSUPPORTED", "logprobs_mode")
    assert http.post("/v1/completions", json=body).status_code == 200


def test_token_ids_need_no_tokenizer(ids_only, grpc_client):
    body = {"model": "dora", "prompt": [IDS, IDS[:3]], "logprobs": 2, "stop_token_ids": [7]}
    answer = ids_only.post("/v1/completions", json={**body, **SAMPLED}).json()
    for prompt, choice in zip(body["prompt"], answer["choices"], strict=True):
        (sample,) = grpc_samples(
            grpc_client, prompt, adapter="dora", logprobs="raw", top_logprobs=2, stop_token_ids=[7]
        )
        assert choice["token_ids"] == sample.token_ids.tolist()
        assert choice["prompt_token_ids"] == prompt and choice["text"] == ""
        assert choice["logprobs"]["token_logprobs"] == sample.logprobs.tolist()
        assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in sample.token_ids]
        assert choice["finish_reason"] == sample.finish_reason.value


def test_a_stream_of_token_ids_needs_no_tokenizer(ids_only, grpc_client):
    body = {"model": "dora", "prompt": IDS, "stream": True, **SAMPLED}
    with ids_only.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    (sample,) = grpc_samples(grpc_client, IDS, adapter="dora")
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert list(itertools.chain(*(c["token_ids"] for c in choices))) == sample.token_ids.tolist()
    assert choices[-1]["finish_reason"] == sample.finish_reason.value and lines[-1] == "[DONE]"


def test_an_echo_of_token_ids_needs_no_tokenizer(ids_only, grpc_client, base):
    body = {"model": base, "prompt": IDS, "echo": True, "logprobs": 0, "max_tokens": 0}
    (choice,) = ids_only.post("/v1/completions", json=body).json()["choices"]
    assert choice["token_ids"] == IDS and choice["text"] == ""
    assert choice["logprobs"]["token_logprobs"][1:] == grpc_client.score([IDS])[0, 0].tolist()[1:]


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("completions", {"prompt": "text"}),
        ("completions", {"prompt": [5, 6], "stop": "x"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_a_gateway_without_a_tokenizer_says_what_takes_token_ids(ids_only, base, route, fields):
    answer = ids_only.post(f"/v1/{route}", json={"model": base, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "TOKENIZER_NOT_CONFIGURED")
    assert "by /v1/completions and the Open Inference Protocol (/v2)" in error["message"]


def test_a_text_prompt_is_encoded_as_the_tokenizer_begins_a_text(client, base, text):
    words = "naïve 日本 words"
    options = {"model": base, "max_tokens": 8, "temperature": 0}
    answer = client.completions.create(prompt=words, **options, **extra(return_token_ids=True))
    assert answer.choices[0].prompt_token_ids == text.encode(words)
    assert answer.choices[0].prompt_token_ids[0] == 1
    plain = client.completions.create(
        prompt=[words, "b"], **options, **extra(return_token_ids=True, add_special_tokens=False)
    )
    assert plain.choices[0].prompt_token_ids == text.encode(words)[1:]
    assert plain.choices[1].prompt_token_ids == text.encode("b")[1:]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_tokens_ends_the_answer_where_it_begins(
    client, base, streamed, include
):
    options = {"model": base, "prompt": IDS, "temperature": 1.0, "seed": 5, "logprobs": 0}
    whole = client.completions.create(**options, max_tokens=40).choices[0].text
    stop = whole[12:17]  # Tokens are one or two characters.
    begin = whole.find(stop)
    answer = client.completions.create(
        **options,
        max_tokens=40,
        stop=["never in the text", stop],
        stream=streamed,
        **extra(include_stop_str_in_output=include),
    )
    choices = [c for e in answer for c in e.choices] if streamed else answer.choices
    shown = "".join(c.text for c in choices)
    assert shown == whole[: begin + (len(stop) if include else 0)]
    assert choices[-1].finish_reason == "stop" and choices[-1].stop_reason == stop
    offsets = [o for c in choices for o in c.logprobs.text_offset]
    assert offsets and max(offsets) < len(shown)


def test_a_stop_token_ends_the_answer_and_is_named(client, grpc_client, base, text):
    (sample,) = grpc_samples(grpc_client, IDS, seed=5)
    stop = int(sample.token_ids[9])
    answer = client.completions.create(
        model=base,
        prompt=IDS,
        **{**SAMPLED, "seed": 5},
        **extra(stop_token_ids=[stop], return_token_ids=True),
    )
    (choice,) = answer.choices
    first = sample.token_ids.tolist().index(stop)
    assert choice.token_ids == sample.token_ids[: first + 1].tolist()
    assert choice.finish_reason == "stop" and choice.stop_reason == stop
    assert choice.text == text.decode(sample.token_ids[:first])


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("stop", [[], ["absent"]])
def test_every_choice_echoes_the_scores_of_its_prompt(client, grpc_client, base, streamed, stop):
    prompts, n, new = [IDS, IDS[::-1]], 2, 3
    answer = client.completions.create(
        model=base, prompt=prompts, n=n, echo=True, logprobs=2, max_tokens=new, seed=5,
        stop=stop, stream=streamed, **extra(return_token_ids=True, ignore_eos=True),
    )  # fmt: skip
    logprobs, tops, ids = ([[] for _ in range(4)] for _ in range(3))
    for choice in (c for e in answer for c in e.choices) if streamed else answer.choices:
        logprobs[choice.index] += choice.logprobs.token_logprobs
        tops[choice.index] += choice.logprobs.top_logprobs
        ids[choice.index] += choice.token_ids
    assert len({tuple(i) for i in ids}) == 4
    for index in range(4):
        assert ids[index][: len(IDS)] == prompts[index // n] and len(ids[index]) == len(IDS) + new
        scored = grpc_client.score([ids[index]], top_k=2)
        assert logprobs[index][0] is None and tops[index][0] is None
        assert logprobs[index][1:] == scored[0, 0].tolist()[1:]
        for row, values in zip(tops[index], scored.top_logprobs[0][0].logprobs, strict=True):
            assert row is None or set(values.tolist()) <= set(row.values())


@pytest.mark.parametrize("streamed", [False, True])
def test_echo_shows_the_prompt_with_its_scores(client, grpc_client, text, streamed):
    prompt = text.encode("an echo")
    answer = client.completions.create(
        model="dora", prompt=prompt, echo=True, logprobs=1, max_tokens=4, temperature=0,
        stream=streamed, **extra(return_token_ids=True),
    )  # fmt: skip
    choices = [c for e in answer for c in e.choices] if streamed else answer.choices
    ids = list(itertools.chain(*(c.token_ids for c in choices)))
    scores = grpc_client.score([ids], ["dora"])[0, 0].tolist()
    logprobs = list(itertools.chain(*(c.logprobs.token_logprobs for c in choices)))
    assert ids[: len(prompt)] == prompt and len(ids) == len(prompt) + 4
    assert logprobs[0] is None and logprobs[1:] == pytest.approx(scores[1:], abs=1e-6)
    assert "".join(c.text for c in choices).startswith("an echo")
    offsets = list(itertools.chain(*(c.logprobs.text_offset for c in choices)))
    assert offsets == sorted(offsets) and offsets[len(prompt)] == len("an echo")


def test_echo_without_tokens_only_scores_the_prompt(client, grpc_client, base):
    answer = client.completions.create(
        model=base, prompt=IDS, echo=True, logprobs=0, max_tokens=0, n=1
    )
    scores = grpc_client.score([IDS])[0, 0].tolist()
    assert answer.choices[0].logprobs.token_logprobs[1:] == scores[1:]
    assert math.isnan(scores[0]) and answer.usage.completion_tokens == 0


@pytest.mark.parametrize("fields", [{"max_tokens": 1}, {"max_tokens": 0}, {"logprobs": 0}])
def test_echo_of_a_prompt_longer_than_the_context_is_refused_as_by_the_server(
    http, base, grpc_client, fields
):
    length = grpc_client.info().model.context_length + 1
    body = {"model": base, "prompt": [40] * length, "max_tokens": 0, "echo": True, **fields}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    wanted = http.post("/v1/completions", json={**body, "echo": False, "max_tokens": 1}).json()
    if body["max_tokens"] == 0:  # Nothing needs to fit in behind the prompt.
        wanted = json.loads(json.dumps(wanted).replace(f"{length - 2}", f"{length - 1}"))
    assert answer.json() == wanted and wanted["error"]["code"] == "PROMPT_TOO_LONG"


def test_echo_takes_a_prompt_of_the_whole_context(client, base, grpc_client, text):
    prompt = [40] * grpc_client.info().model.context_length
    answer = client.completions.create(model=base, prompt=prompt, max_tokens=0, echo=True)
    assert answer.choices[0].text == text.decode(prompt)


def test_repeated_prompts_report_cached_tokens(client, base):
    prompt = [1, *range(50, 130)]
    for _ in range(2):
        answer = client.completions.create(model=base, prompt=prompt, max_tokens=1)
    assert answer.usage.prompt_tokens_details.cached_tokens > 0
