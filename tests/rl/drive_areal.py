"""AReaL's VLLMBackend: it builds the requests and parses the answers, its own HTTP client sends.

Arguments: host:port, adapters' root. A line on standard input says that the long request runs.
"""

import asyncio
import json
import sys

from areal.api.cli_args import GenerationHyperparameters
from areal.api.io_struct import ModelRequest, WeightUpdateMeta
from areal.engine.vllm_remote import VLLMBackend
from areal.infra.utils.http import arequest_with_retry

ADDRESS, ROOT = sys.argv[1:]
IDS = [1, 40, 77, 120, 33]
BACKEND = VLLMBackend()


async def send(request):
    return await arequest_with_retry(
        ADDRESS,
        request.endpoint,
        request.payload,
        method=request.method,
        max_retries=1,
        timeout=250,
    )


async def generate(version, ids=IDS, tokens=12, **changes):
    config = GenerationHyperparameters(
        max_new_tokens=tokens, greedy=True, lora_name="Actor", **changes
    )
    request = ModelRequest(input_ids=list(ids), gconfig=config)
    built = BACKEND.build_generation_request(request, version is not None, version or 0)
    found = BACKEND.parse_generation_response(await send(built))
    return [found.output_tokens, found.output_logprobs, found.stop_reason]


async def load(version, kind):
    meta = WeightUpdateMeta(
        type="disk", path=f"{ROOT}/{kind}", use_lora=True, lora_name="Actor", version=version
    )
    for request in BACKEND.build_disk_weight_update_requests(meta).requests:
        await send(request)


async def main():
    found = {}
    await send(BACKEND.get_health_check_request())
    await load(1, "dora-0")
    found["first"] = await generate(1)
    found["base"] = await generate(None)
    score = BACKEND.build_score_request(IDS, 3, False, 0)
    found["score"] = BACKEND.parse_score_response(await send(score), 3)
    task = asyncio.create_task(generate(1, tokens=6000, ignore_eos=True))
    await asyncio.to_thread(sys.stdin.readline)
    found["paused"] = await send(BACKEND.get_pause_request())
    found["aborted"] = await task
    waiting = asyncio.create_task(generate(1))
    await load(2, "dora-1")
    found["continued"] = await send(BACKEND.get_resume_request())
    found["waiting"] = await waiting
    found["second"] = await generate(2)
    await send(BACKEND.get_offload_request())
    await send(BACKEND.get_onload_request(["weights"]))
    await send(BACKEND.get_onload_request(["kv_cache"]))
    found["awake"] = await generate(2)
    print(json.dumps(found))


asyncio.run(main())
