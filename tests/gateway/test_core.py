"""What the gateway asks the server for all of its callers."""

import asyncio
from types import SimpleNamespace

import pytest
from dorad.errors import DeadlineExceeded
from dorad.gateway.core import Gateway, Limits


class Servers:
    """Answers each request on demand, or fails."""

    def __init__(self):
        self.questions = 0
        self.error = None
        self.answers = asyncio.Event()
        self.states = {}

    def of(self):
        return self

    async def info(self, *, timeout):
        self.questions += 1
        await self.answers.wait()
        if self.error is not None:
            raise self.error
        return SimpleNamespace(model="facts")


def with_callers(body, count=5):
    """Runs `body(server, gateway, tasks)`; the tasks have asked for the model and wait."""

    async def run():
        server = Servers()
        gateway = Gateway(server, None, Limits())
        tasks = [asyncio.create_task(gateway.model()) for _ in range(count)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert server.questions == 1
        await body(server, gateway, tasks)

    asyncio.run(asyncio.wait_for(run(), 20))


def test_one_question_answers_all_who_wait():
    async def body(server, gateway, tasks):
        server.answers.set()
        assert await asyncio.gather(*tasks) == ["facts"] * 5
        assert await gateway.model() == "facts" and server.questions == 1

    with_callers(body)


def test_one_failure_is_for_all_who_wait_and_the_next_asks_again():
    async def body(server, gateway, tasks):
        server.error = DeadlineExceeded("too late", code="DEADLINE_EXCEEDED")
        server.answers.set()
        assert await asyncio.gather(*tasks, return_exceptions=True) == [server.error] * 5
        assert server.questions == 1
        server.error = None
        assert await gateway.model() == "facts" and server.questions == 2

    with_callers(body)


def test_who_goes_away_does_not_take_the_question_along():
    async def body(server, gateway, tasks):
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        server.answers.set()
        assert await asyncio.gather(*tasks[1:]) == ["facts"] * 4 and server.questions == 1

    with_callers(body)


def test_a_failure_that_nobody_waits_for_any_more_is_not_reported_as_lost():
    async def body(server, gateway, tasks):
        lost = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: lost.append(what))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        server.error = DeadlineExceeded("too late", code="DEADLINE_EXCEEDED")
        server.answers.set()
        await asyncio.sleep(0.05)
        server.error = None
        assert await gateway.model() == "facts"
        assert lost == []

    with_callers(body)
