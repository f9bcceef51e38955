"""SkyRL's RemoteInferenceClient. Arguments: URL, base model, adapters' root. Prints what it got."""

import asyncio
import json
import sys

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (
    RemoteInferenceClient,
)

URL, BASE, ROOT = sys.argv[1:]
IDS = [[1, 40, 77, 120, 33], [1, 200, 9]]
PARAMS = {"temperature": 0.7, "max_tokens": 12, "logprobs": 0, "seed": 11}
LONG = {**PARAMS, "max_tokens": 600, "ignore_eos": True}


async def main():
    client = RemoteInferenceClient(
        proxy_url=URL,
        server_urls=[URL],
        data_parallel_size=1,
        model_name=BASE,
        uses_lora_weight_sync=True,
    )
    found = {}

    async def generate(params=PARAMS, model="Policy_A"):
        batch = {"prompt_token_ids": IDS, "sampling_params": params, "cache_salt": "1"}
        return await client.generate(batch, model=model)

    async def meanwhile(params, change):
        task = asyncio.create_task(generate(params))
        await asyncio.to_thread(sys.stdin.readline)  # It runs now.
        await change()
        return task

    async with client:
        found["world_size"] = await client.get_world_size()
        await client.load_lora_adapter("Policy_A", f"{ROOT}/dora-0")
        found["first"] = await generate()
        found["base"] = await generate(model=BASE)
        print("keep", flush=True)
        task = await meanwhile(LONG, client.pause_generation)
        await client.load_lora_adapter("Policy_B", f"{ROOT}/dora-1")
        await client.resume_generation()
        found["kept"] = await task
        found["whole"] = await generate(LONG)
        print("abort", flush=True)
        task = await meanwhile({**LONG, "max_tokens": 6000}, lambda: client.pause("abort"))
        found["aborted"] = await task
        await client.resume()
        print("wait", flush=True)
        task = await meanwhile(LONG, lambda: client.pause("wait", clear_cache=True))
        found["waited"] = await task
        late = asyncio.create_task(generate())
        await client.resume()
        found["late"] = await late
        await client.sleep(level=2)
        await client.wake_up(tags=["weights"])
        await client.wake_up(tags=["kv_cache"])
        await client.reset_prefix_cache()
        found["awake"] = await generate()
        await client.load_lora_adapter("Policy_A", f"{ROOT}/dora-1")
        found["second"] = await generate()
        request = {
            "model": "Policy_A",
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": IDS[0]}]},
            "num_samples": 2,
            "sampling_params": {"max_tokens": 6, "temperature": 1.0, "seed": 3, "top_k": -1},
            "include_prompt_logprobs": True,
            "topk_prompt_logprobs": 2,
        }
        found["sample"] = await client.sample({"json": request})
        (tokens,) = await client.tokenize(["harbour"])
        found["text"] = await client.detokenize([tokens[1:]])
        await client.finish_session("s1")
        await client.unload_lora_adapter("Policy_A")
        try:
            await generate()
        except Exception as error:
            found["unloaded"] = [getattr(error, "status", None), str(error)]
        try:
            await client.load_lora_adapter("x", "/etc")
        except Exception as error:
            found["outside"] = [getattr(error, "status", None), str(error)]
    print(json.dumps(found))


asyncio.run(main())
