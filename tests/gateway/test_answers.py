"""Questions that many have: which are asked, and which answers are known."""

import asyncio

import pytest
from dorad.gateway.answers import Answers


class Oracle:
    """Counts what it is asked; answers when the loop comes round again."""

    def __init__(self):
        self.asked = []

    def asks(self, key, error=None):
        async def ask():
            self.asked.append(key)
            await asyncio.sleep(0)
            if error is not None:
                raise error
            return f"about {key}"

        return ask


def test_each_key_is_a_question_of_its_own():
    async def run():
        oracle, answers = Oracle(), Answers(seconds=60, most=4)
        got = await asyncio.gather(*(answers.get(key, oracle.asks(key)) for key in "abab"))
        assert got == ["about a", "about b"] * 2 and oracle.asked == ["a", "b"]

    asyncio.run(run())


def test_the_answers_kept_are_those_used_last():
    async def run():
        oracle, answers = Oracle(), Answers(seconds=60, most=2)
        for key in "abac":  # c takes the place of b
            await answers.get(key, oracle.asks(key))
        assert oracle.asked == ["a", "b", "c"]
        await answers.get("a", oracle.asks("a"))
        assert oracle.asked == ["a", "b", "c"]
        await answers.get("b", oracle.asks("b"))
        assert oracle.asked == ["a", "b", "c", "b"]

    asyncio.run(run())


def test_an_answer_that_is_none_is_known_as_well():
    async def run():
        asked = []

        async def ask():
            asked.append(1)

        answers = Answers(seconds=60)
        assert [await answers.get("", ask) for _ in range(3)] == [None] * 3 and asked == [1]

    asyncio.run(run())


def test_a_failure_leaves_the_answers_to_other_questions():
    async def run():
        oracle, answers = Oracle(), Answers(seconds=60, most=4)
        await answers.get("a", oracle.asks("a"))
        for _ in range(2):
            with pytest.raises(ValueError, match="no"):
                await answers.get("b", oracle.asks("b", ValueError("no")))
        await answers.get("a", oracle.asks("a"))
        assert oracle.asked == ["a", "b", "b"]

    asyncio.run(run())
