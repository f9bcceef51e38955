"""A rollout batch through an engine of vllm_peer.py, which is to be imported first."""

import time

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from lib.rollout import Point, Request


def run_batch(llm: LLM, requests: list[Request], adapters: list) -> tuple[float, list[Point], int]:
    """What LLM.generate does, with the moments of its steps: seconds, points, tokens."""
    engine, tokens = llm.llm_engine, 0
    points, begin = [Point(0.0, 0, 0)], time.perf_counter()
    for i, request in enumerate(requests):
        sampling = SamplingParams(
            n=request.samples,
            temperature=1.0,
            max_tokens=request.tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,  # that of the sampled token
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        engine.add_request(
            f"{begin}-{i}",
            {"prompt_token_ids": request.prompt},
            sampling,
            lora_request=adapters[request.adapter % len(adapters)],
        )
    steps = 0
    while engine.has_unfinished_requests():
        for answer in engine.step():
            tokens += sum(len(output.token_ids) for output in answer.outputs)
        steps += 1
        now = time.perf_counter() - begin
        points.append(Point(now, engine.get_num_unfinished_requests(), steps))
    return points[-1].at, points, tokens
