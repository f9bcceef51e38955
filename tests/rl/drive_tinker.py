"""What Tinker's cookbook does: its own completers over dorad's sampling client.

Arguments: address of the server, model folder.
"""

import asyncio
import json
import sys

import dorad.tinker
import tinker
from dorad.text import ModelText
from tinker_cookbook.completers import TinkerTokenCompleter

SERVER, FOLDER = sys.argv[1:]
IDS = [1, 40, 77, 120, 33]


async def main():
    prompt = tinker.ModelInput.from_ints(IDS)
    text = ModelText(FOLDER)
    async with dorad.aio.Client(SERVER, timeout=200) as client:
        sampler = dorad.tinker.SamplingClient(client, "policy", text=text)
        completer = TinkerTokenCompleter(sampler, max_tokens=12, context_window=100)
        completed = [await completer(prompt, stop=[], max_tokens=n) for n in (5, None)]
        params = tinker.SamplingParams(max_tokens=24, temperature=0.7, seed=3, stop=[])
        whole = await sampler.sample(prompt, 3, params, include_prompt_logprobs=True)
        first = whole.sequences[0]
        # A stop token and a stop string that occur in the first sample.
        by_id = tinker.SamplingParams(
            max_tokens=24, temperature=0.7, seed=3, stop=[first.tokens[7]]
        )
        ended = (await sampler.sample(prompt, 1, by_id)).sequences[0]
        # Tokens of a random model may have no text.
        pieces = [
            text.decode(first.tokens[i : i + 2], skip_special_tokens=False) for i in range(22)
        ]
        at = next(i for i in range(5, 22) if pieces[i])
        piece = pieces[at]
        by_text = tinker.SamplingParams(max_tokens=24, temperature=0.7, seed=3, stop=[piece])
        cut = (await sampler.sample(prompt, 2, by_text)).sequences
        refused = []
        for call in (
            lambda: sampler.sample(prompt, 1, params, topk_sample_logprobs=3),
            lambda: dorad.tinker.SamplingClient(client).sample(prompt, 1, by_text),
        ):
            try:
                await call()
            except ValueError as error:
                refused.append(str(error))
        scored = await sampler.compute_logprobs(prompt)

    def shown(sequence):
        return [sequence.tokens, sequence.logprobs, sequence.stop_reason]

    print(
        json.dumps(
            {
                "completed": [[c.tokens, c.logprobs, c.stop_reason] for c in completed],
                "whole": [shown(s) for s in whole.sequences],
                "prompt": whole.prompt_logprobs[1:],
                "scored": scored,
                "ended": shown(ended),
                "cut": [shown(s) for s in cut],
                "piece": piece,
                "piece_end": at + 2,
                "refused": refused,
            }
        )
    )


asyncio.run(main())
