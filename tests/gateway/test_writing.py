"""JSON of answers, written part by part."""

import asyncio
import json
import time

import pytest
from dorad.gateway.writing import Rows, to_json, write


@pytest.mark.parametrize("count", [0, 1, 16, 17, 100])
def test_rows_are_written_as_the_list_they_stand_for(count):
    def value(rows):
        return {"a": [1, {"é": rows}, {}], "b": [], "c": {"d": rows, 'e"': None}}

    written = asyncio.run(write(value(Rows(range(count), lambda i: {"row": [i, "🙂"]}))))
    assert written == to_json(value([{"row": [i, "🙂"]} for i in range(count)]))
    assert len(json.loads(written)["c"]["d"]) == count


def test_what_is_no_json_is_still_an_error():
    for value in ({"a": object()}, Rows([1], lambda _: object())):
        with pytest.raises(TypeError):
            asyncio.run(write(value))


def test_others_have_their_turn_while_rows_are_written():
    turns = 0

    async def other():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def both():
        task = asyncio.create_task(other())
        await write({"rows": Rows(range(160), lambda _: time.sleep(0.001))})
        task.cancel()

    asyncio.run(both())
    assert turns >= 8
