"""dorad.Answers: the drafts of prompts that come again, against the fake server."""

import asyncio
import dataclasses

import dorad
import dorad.aio
import numpy as np
import pytest
from dorad.types import FinishReason, Usage

PROMPT = [3, 4, 5]
REQUEST = dorad.GenerateRequest(PROMPT, adapter="a@1", n=2, seed=7, temperature=0.7)


def sample(tokens, index=0):
    return dorad.Sample(
        index=index,
        token_ids=np.array(tokens, np.int32),
        logprobs=None,
        top_logprobs=None,
        chosen_logprobs=None,
        finish_reason=FinishReason.LENGTH,
        stop_token_id=None,
        stop_sequence=None,
        detail="",
        spans=[],
        usage=Usage(),
        seed=7,
        request_id="",
    )


def drafts_of(request):
    return None if request.drafts is None else [list(tokens) for tokens in request.drafts]


def sent_drafts(server):
    return [[np.frombuffer(d.token_ids, "<i4").tolist() for d in c.drafts] for c in calls(server)]


def calls(server):
    return sorted(server.generate_calls, key=lambda call: call.prompt_token_ids)


@pytest.fixture
def answers():
    made = dorad.Answers()
    made.keep(REQUEST, [sample([10, 11]), sample([20])])
    return made


def requests(**options):
    return [dorad.GenerateRequest([i], n=2, max_tokens=3, seed=i, **options) for i in range(4)]


EXPECTED = [[[i, i + 1, i + 2], [i + 10, i + 11, i + 12]] for i in range(4)]


@pytest.mark.parametrize("kind", ["sync", "aio", "pool"])
def test_generate_many_keeps_answers_and_offers_them(server, kind):
    answers = dorad.Answers()

    def run():
        server.generate_calls.clear()
        if kind == "sync":
            with dorad.Client(server.target, timeout=20) as client:
                return client.generate_many(requests(), answers=answers)
        if kind == "pool":
            with dorad.RolloutPool([server.target]) as pool:
                return pool.generate_many(requests(), answers=answers)

        async def work():
            async with dorad.aio.Client(server.target, timeout=20) as client:
                return await client.generate_many(requests(), answers=answers)

        return asyncio.run(work())

    run()
    assert sent_drafts(server) == [[]] * 4
    results = run()
    assert sent_drafts(server) == EXPECTED
    assert [[s.token_ids.tolist() for s in samples] for samples in results] == EXPECTED


@pytest.mark.parametrize(
    "changes",
    [
        {"adapter": "a"},
        {"adapter": "a@2:0f3c81aa"},
        {"max_tokens": 9, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [9]},
        {"logprobs": "raw", "priority": 3, "cache_salt": "s", "request_id": "r"},
        {"token_ids": np.array(PROMPT, np.int64)},
        {"token_ids": [1, 2, *PROMPT], "truncate_prompt_tokens": 3},
    ],
)
def test_what_does_not_change_the_tokens_finds_the_answers(answers, changes):
    request = dataclasses.replace(REQUEST, **changes)
    offered = answers.offer(request)
    assert drafts_of(offered) == [[10, 11], [20]] and request.drafts is None
    assert dataclasses.replace(offered, drafts=None) == request


IMAGE = dorad.Image(0, 1, (1, 2, 2), np.zeros((4, 3), np.float32))


@pytest.mark.parametrize(
    "changes",
    [
        {"adapter": None},
        {"adapter": "b"},
        {"seed": 8},
        {"temperature": 0.8},
        {"top_p": 0.9},
        {"repetition_penalty": 1.1},
        {"logit_bias": {3: 1.0}},
        {"bad_words": [[9]]},
        {"token_ids": [3, 4]},
        {"token_ids": PROMPT, "truncate_prompt_tokens": 2},
        {"images": [IMAGE]},
    ],
)
def test_what_changes_the_tokens_does_not(answers, changes):
    request = dataclasses.replace(REQUEST, **changes)
    assert answers.offer(request) is request
    # And has answers of its own, beside the others.
    answers.keep(request, [sample([30])])
    assert drafts_of(answers.offer(request)) == [[30]]
    assert drafts_of(answers.offer(REQUEST)) == [[10, 11], [20]]


def test_the_pixels_tell_images_apart(answers):
    request = dataclasses.replace(REQUEST, images=[IMAGE])
    answers.keep(request, [sample([30])])
    bare = dataclasses.replace(REQUEST, images=[IMAGE.without_pixels()])
    assert drafts_of(answers.offer(bare)) == [[30]]
    other = dorad.Image(0, 1, (1, 2, 2), np.ones((4, 3), np.float32))
    assert answers.offer(dataclasses.replace(REQUEST, images=[other])).drafts is None


@pytest.mark.parametrize(("n", "expected"), [(None, 1), (1, 1), (2, 2), (5, 2)])
def test_each_sample_gets_the_one_of_its_index(answers, n, expected):
    offered = answers.offer(dataclasses.replace(REQUEST, n=n))
    assert drafts_of(offered) == [[10, 11], [20]][:expected]


def test_greedy_requests_need_no_seed(answers):
    request = dataclasses.replace(REQUEST, seed=None, temperature=0)
    answers.keep(request, [sample([30])])
    assert drafts_of(answers.offer(dataclasses.replace(request, seed=5))) == [[30]]


def test_a_request_without_a_seed_is_refused_before_any_is_sent(client, server):
    many = [*requests(), dorad.GenerateRequest(PROMPT)]
    with pytest.raises(ValueError, match="seed"):
        client.generate_many(many, answers=dorad.Answers())
    assert not server.generate_calls


def test_drafts_of_the_request_stay(answers):
    request = dataclasses.replace(REQUEST, drafts=[[1]])
    assert answers.offer(request) is request


def test_new_answers_take_the_place_of_old_ones(answers):
    answers.keep(REQUEST, [sample([]), sample([5, 6, 7])])
    assert drafts_of(answers.offer(REQUEST)) == [[], [5, 6, 7]]


def test_it_keeps_copies(answers):
    mine = sample([1, 2, 3])
    answers.keep(REQUEST, [mine])
    mine.token_ids[:] = 0
    assert drafts_of(answers.offer(REQUEST)) == [[1, 2, 3]]


def test_the_least_recently_used_make_room():
    answers = dorad.Answers(max_bytes=3 * (256 + 4 * 100))
    many = [dataclasses.replace(REQUEST, seed=i) for i in range(4)]

    def kept():
        return [i for i, request in enumerate(many) if answers.offer(request).drafts]

    for request in many[:3]:
        answers.keep(request, [sample(range(100))])
    answers.offer(many[0])
    answers.keep(many[3], [sample(range(100))])
    assert kept() == [0, 2, 3]
    answers.keep(many[0], [sample(range(99))])
    answers.keep(many[0], [sample(range(100))])  # In its own place.
    assert kept() == [0, 2, 3]
    answers.keep(many[1], [sample(range(101))])  # A token too many for three.
    assert kept() == [1, 3]
    answers.keep(many[2], [sample([])] * 6)  # Empty ones take space, too.
    assert kept() == [2]


def test_what_is_larger_than_all_of_it_is_not_kept():
    answers = dorad.Answers(max_bytes=1000)
    answers.keep(REQUEST, [sample([1])])
    other = dataclasses.replace(REQUEST, seed=8)
    answers.keep(other, [sample(range(200))])
    assert answers.offer(other).drafts is None
    assert drafts_of(answers.offer(REQUEST)) == [[1]]


def test_drafts_stay_within_the_servers_limit():
    answers = dorad.Answers(max_draft_tokens=7)
    answers.keep(REQUEST, [sample(range(9)), sample(range(2))])
    assert drafts_of(answers.offer(REQUEST)) == [[0, 1, 2], [0, 1]]
    alone = answers.offer(dataclasses.replace(REQUEST, n=1))
    assert drafts_of(alone) == [[0, 1, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize("return_errors", [False, True])
def test_answers_before_an_error_are_kept(client, server, return_errors):
    answers = dorad.Answers()
    many = [*requests(), dorad.GenerateRequest([], seed=1)]  # The server refuses the last one.
    if return_errors:
        client.generate_many(many, answers=answers, return_errors=True)
    else:
        with pytest.raises(dorad.InvalidArgument):
            client.generate_many(many, answers=answers, concurrency=1)
    assert [drafts_of(answers.offer(request)) for request in many[:4]] == EXPECTED
    assert answers.offer(many[4]).drafts is None
