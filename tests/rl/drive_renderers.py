"""What prime-rl and verifiers do: renderers.client.generate, and a load under the same name.

Arguments: URL, model folder, adapters' root. A line on standard input says that the request runs.
"""

import asyncio
import json
import sys

import httpx
import renderers.client
from openai import AsyncOpenAI
from renderers import create_renderer
from renderers.base import load_tokenizer

URL, FOLDER, ROOT = sys.argv[1:]
MESSAGES = [{"role": "user", "content": "Which harbour?"}]


async def main():
    tokenizer = load_tokenizer(FOLDER)
    renderer = create_renderer(tokenizer)
    raw = []
    parse = renderers.client.parse_generate_response

    def parsed(content):  # generate() leaves out the spans of versions.
        raw.append(json.loads(content))
        return parse(content)

    renderers.client.parse_generate_response = parsed
    async with (
        AsyncOpenAI(base_url=f"{URL}/v1", api_key="EMPTY", timeout=250) as client,
        httpx.AsyncClient(base_url=URL, timeout=60) as admin,
    ):

        async def load(kind):
            # As prime-rl's orchestrator: a constant name, a new path, no pause.
            fields = {"lora_name": "policy", "lora_path": f"{ROOT}/{kind}"}
            answer = await admin.post("/load_lora_adapter", json=fields)
            answer.raise_for_status()
            return answer.json()["digest"]

        def generate(**params):
            return renderers.client.generate(
                client=client,
                renderer=renderer,
                messages=MESSAGES,
                model="policy",
                sampling_params={"temperature": 1.0, "seed": 5, "min_tokens": 0, **params},
                cache_salt="step-1",
            )

        digests = [await load("dora-0")]
        task = asyncio.create_task(generate(max_tokens=900, min_tokens=900))
        await asyncio.to_thread(sys.stdin.readline)
        digests.append(await load("dora-1"))
        found = await task
        after = await generate(max_tokens=12)
    print(
        json.dumps(
            {
                "digests": digests,
                "spans": [answer["choices"][0]["dorad"]["spans"] for answer in raw],
                "prompt": found["prompt_ids"],
                "ids": found["completion_ids"],
                "logprobs": found["completion_logprobs"],
                "after": after["completion_ids"],
                "stop": renderer.get_stop_token_ids(),
            }
        )
    )


asyncio.run(main())
