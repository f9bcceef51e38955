"""Long work of one request leaves turns to others, on the gateway's one event loop."""

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from dorad import types as t
from dorad.gateway import completions, samples
from dorad.gateway.assembler import stops_of

TOKENS = 250


def work_of(prompts, n):
    return samples.Work(
        prompts=[[5, 6]] * prompts,
        options={},
        stops=stops_of([], []),
        n=n,
        stream=False,
        eos_token_ids=frozenset(),
    )


class Client:
    """Answers at once with whole samples."""

    def __init__(self, n):
        self.n = n

    async def generate(self, prompt, **options):
        return [
            t.Sample(
                index=i,
                token_ids=np.arange(TOKENS, dtype=np.int32),
                logprobs=None,
                top_logprobs=None,
                chosen_logprobs=None,
                finish_reason=t.FinishReason.LENGTH,
                stop_token_id=None,
                stop_sequence=None,
                detail="",
                spans=[],
                usage=t.Usage(),
                seed=1,
                request_id="r",
            )
            for i in range(self.n)
        ]


@pytest.mark.parametrize("prompts", [1, 64])
def test_others_have_their_turn_after_each_part_of_the_choices(monkeypatch, prompts):
    parts = []  # Tokens of each part, and None for each turn of others.
    push = samples.Assembler.push

    def counted(self, token_ids, *args):
        parts.append(len(token_ids))
        return push(self, token_ids, *args)

    monkeypatch.setattr(samples.Assembler, "push", counted)

    async def others():
        while True:
            parts.append(None)
            await asyncio.sleep(0)

    async def run():
        task = asyncio.create_task(others())
        n = 64 // prompts
        found = await samples.choices(Client(n), None, work_of(prompts, n), 60)
        task.cancel()
        return found

    found = asyncio.run(run())
    assert [len(choice.piece.tokens) for choice in found] == [TOKENS] * 64
    pushed = [i for i, part in enumerate(parts) if part is not None]
    assert sum(parts[i] for i in pushed) == 64 * TOKENS
    assert max(parts[i] for i in pushed) <= 32
    assert all(parts[i + 1] is None for i in pushed[:-1])  # Never two parts in a row.


def test_others_have_their_turn_while_an_echo_is_decoded():
    turn_of_others = threading.Event()

    class Decoder:
        def push(self, token_ids):
            # On the event loop's own thread nobody could set it.
            assert turn_of_others.wait(20)
            return "x"

        def finish(self):
            return ""

    text = SimpleNamespace(stream=lambda skip_special_tokens: Decoder())

    async def run():
        asyncio.get_running_loop().call_later(0.05, turn_of_others.set)
        return await completions._echoes(work_of(2, 1), text)

    assert [piece.text for piece in asyncio.run(run())] == ["xx", "xx"]
