"""/v1/chat/completions through the official client, compared with the gRPC client."""

import asyncio
import itertools

import openai
import pytest

MESSAGES = [
    {"role": "system", "content": "You are terse."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "Grüße "}, {"type": "text", "text": "🙂"}],
    },
]
WRITTEN = "system: You are terse.\nuser: Grüße 🙂\nassistant: "
SAMPLED = {"max_completion_tokens": 24, "temperature": 1.0, "seed": 11}


@pytest.fixture
def prompt(text):
    return text.encode(WRITTEN, special_tokens=False)


@pytest.mark.parametrize("model", [None, "dora"])
def test_tokens_and_logprobs_are_those_of_the_grpc_client(
    client, grpc_client, base, text, prompt, model
):
    answer = client.chat.completions.create(
        model=model or base, messages=MESSAGES, logprobs=True, top_logprobs=3, n=2, **SAMPLED,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    samples = grpc_client.generate(
        prompt, adapter=model, n=2, max_tokens=24, temperature=1.0, seed=11, logprobs="raw",
        top_logprobs=3,
    )  # fmt: skip
    assert answer.prompt_token_ids == prompt
    for choice, sample in zip(answer.choices, samples, strict=True):
        assert choice.token_ids == sample.token_ids.tolist()
        assert choice.message.role == "assistant"
        assert choice.message.content == text.decode([i for i in sample.token_ids if i != 2])
        rows = choice.logprobs.content
        assert [row.logprob for row in rows] == sample.logprobs.tolist()
        assert [bytes(row.bytes) for row in rows] == [
            text.token_bytes(int(i)) for i in sample.token_ids
        ]
        top = [[entry.logprob for entry in row.top_logprobs] for row in rows]
        assert top == sample.top_logprobs.logprobs.tolist()


@pytest.mark.parametrize("model", [None, "dora"])
def test_streamed_deltas_join_to_the_whole_answer(client, base, model):
    options = {"model": model or base, "messages": MESSAGES, "logprobs": True, "n": 2, **SAMPLED}
    for _ in range(2):  # The second one and the stream find the prompt in the cache.
        whole = client.chat.completions.create(**options)
    parts = {0: [], 1: []}
    usage = None
    for event in client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ):
        usage = event.usage or usage
        for choice in event.choices:
            parts[choice.index].append(choice)
    assert usage == whole.usage
    for choice, pieces in zip(whole.choices, parts.values(), strict=True):
        assert pieces[0].delta.role == "assistant"
        assert all(p.delta.role is None for p in pieces[1:])
        assert "".join(p.delta.content or "" for p in pieces) == choice.message.content
        rows = itertools.chain(*(p.logprobs.content for p in pieces if p.logprobs))
        assert list(rows) == choice.logprobs.content
        assert pieces[-1].finish_reason == choice.finish_reason
        (span,) = choice.dorad["spans"]
        assert (span["adapter"], span["end"]) == (model, len(choice.logprobs.content))
        spans = [span for p in pieces if hasattr(p, "dorad") for span in p.dorad["spans"]]
        assert [s["begin"] for s in spans] == [0, *(s["end"] for s in spans[:-1])]
        assert {**spans[-1], "begin": 0} == span
        assert {**pieces[-1].dorad, "spans": [span]} == choice.dorad


def test_a_character_of_several_tokens_is_never_split(client, base, text):
    """Bytes of one character come in several tokens; each event's text is whole."""
    for seed in range(4):
        events = client.chat.completions.create(
            model=base, messages=MESSAGES, stream=True, max_completion_tokens=40, seed=seed,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        pieces, ids = [], []
        for event in events:
            pieces.append(event.choices[0].delta.content or "")
            ids += event.choices[0].token_ids
        assert "".join(pieces) == text.decode([i for i in ids if i != 2])


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_logprobs_are_of_the_mode_that_is_asked_for(client, grpc_client, base, prompt, mode):
    options = {"temperature": 0.7, "seed": 11, "top_logprobs": 2}
    answer = client.chat.completions.create(
        model=base, messages=MESSAGES, max_tokens=8, logprobs=True, **options,
        extra_body={"logprobs_mode": mode, "top_k": 5},
    )  # fmt: skip
    (sample,) = grpc_client.generate(prompt, max_tokens=8, top_k=5, logprobs=mode, **options)
    rows = answer.choices[0].logprobs.content
    assert [row.logprob for row in rows] == sample.logprobs.tolist()
    top = [[entry.logprob for entry in row.top_logprobs] for row in rows]
    assert top == sample.top_logprobs.logprobs.tolist()


def test_stop_ends_a_chat(client, base):
    options = {"model": base, "messages": MESSAGES, "temperature": 0.0}
    whole = client.chat.completions.create(**options, max_tokens=30).choices[0].message.content
    stop = whole[8:12]
    (choice,) = client.chat.completions.create(**options, max_tokens=30, stop=stop).choices
    assert choice.message.content == whole[: whole.find(stop)]
    assert choice.finish_reason == "stop" and choice.stop_reason == stop


def test_template_variables_reach_the_template(client, base, text):
    answer = client.chat.completions.create(
        model=base,
        messages=[{"role": "user", "content": "x"}],
        max_tokens=1,
        extra_body={"return_token_ids": True, "chat_template_kwargs": {"tone": "pirate"}},
    )
    assert text.decode(answer.prompt_token_ids) == "user: x\npirate: "


def test_what_the_template_refuses_is_the_callers_fault(client, base):
    with pytest.raises(openai.BadRequestError, match="nobody speaks") as caught:
        client.chat.completions.create(
            model=base, messages=[{"role": "nobody", "content": "x"}], max_tokens=1
        )
    assert caught.value.code == "CHAT_TEMPLATE_REFUSED"


def test_concurrent_streams_get_their_own_answers(gateway, base):
    async def one(client, seed):
        stream = await client.chat.completions.create(
            model=["dora", "lora", base][seed % 3],
            messages=MESSAGES,
            stream=True,
            max_completion_tokens=20,
            seed=seed,
        )
        return "".join([e.choices[0].delta.content or "" async for e in stream])

    async def run():
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any") as client:
            together = await asyncio.gather(*(one(client, seed) for seed in range(24)))
            alone = [await one(client, seed) for seed in range(24)]
        return together, alone

    together, alone = asyncio.run(run())
    assert together == alone and len(set(together)) > 12
