"""Tinker's cookbook over a dorad server: an object in the place of `tinker.SamplingClient`.

    async with dorad.aio.Client("127.0.0.1:50051") as client:
        sampler = dorad.tinker.SamplingClient(client, adapter="policy")
        completer = TinkerTokenCompleter(sampler, max_tokens=512)

Works with the cookbook's completers, evaluators and rollouts that sample. Needs the package
`tinker`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import tinker

from dorad import aio
from dorad import types as t
from dorad.answers import Answers
from dorad.text import ModelText

_ENDS = {t.FinishReason.STOP: "stop", t.FinishReason.LENGTH: "length"}


class SamplingClient:
    """The methods of `tinker.SamplingClient` that sample and score. Use it from one event loop.

    Args:
      client: of a running server. The caller closes it.
      adapter: "name" or "name@version"; None: the base model.
      text: the model's tokenizer, for stop strings. Lists of stop tokens need none.
      logprobs: of the sampled tokens: "raw", as a trainer computes them from undivided logits, or
        "scaled" by the temperature.
      answers: those of earlier calls, for prompts that come again with their `seed`, or at
        temperature 0: they become drafts, and the new ones take their place. Samples that end at
        stop strings are neither kept nor drafted.
    """

    def __init__(
        self,
        client: aio.Client,
        adapter: str | None = None,
        *,
        text: ModelText | None = None,
        logprobs: t.LogprobMode = "raw",
        answers: Answers | None = None,
    ) -> None:
        self._client = client
        self._adapter = adapter
        self._text = text
        self._logprobs = logprobs
        self._answers = answers

    async def sample(
        self,
        prompt: tinker.ModelInput,
        num_samples: int,
        sampling_params: tinker.SamplingParams,
        include_prompt_logprobs: bool = False,
        **others: object,
    ) -> tinker.SampleResponse:
        """Samples continuations of a prompt of tokens.

        Without `stop` the model's end-of-sequence tokens end a sample, with it only what it lists:
        token ids, or strings, after which the tokens end with the one that completes the string.

        Raises:
          ValueError: for images, for an unsupported argument, for stop strings without `text`, and
            with `answers` for `sampling_params` without a seed, unless the temperature is 0.
          RuntimeError: a sample was aborted.
          DoradError: as `Client.generate`.
        """
        for name, value in others.items():
            if value:
                raise ValueError(f"dorad.tinker does not have {name}")
        ids = prompt.to_ints()
        options: t.GenerateOptions = {
            "adapter": self._adapter,
            "max_tokens": sampling_params.max_tokens,
            "temperature": sampling_params.temperature,
            "top_p": sampling_params.top_p,
            "top_k": sampling_params.top_k if sampling_params.top_k > 0 else None,
            "seed": sampling_params.seed,
            "logprobs": self._logprobs,
        }
        stop = sampling_params.stop
        strings = [stop] if isinstance(stop, str) else [s for s in stop or [] if isinstance(s, str)]
        if stop is not None:
            options["ignore_eos"] = True
            options["stop_token_ids"] = [s for s in stop if isinstance(s, int)]
        scored = None
        if include_prompt_logprobs:
            scored = await self._scores(ids)
        if strings:
            made = await self._sample_until(strings, ids, num_samples, options)
        else:
            options["n"] = num_samples
            if self._answers is not None:
                request = self._answers.offer(t.GenerateRequest(ids, **options))
                options["drafts"] = request.drafts
            samples = await self._client.generate(ids, **options)
            if self._answers is not None:
                self._answers.keep(request, samples)
            made = [
                _sequence(str(i), s.token_ids, s.logprobs, s.finish_reason)
                for i, s in enumerate(samples)
            ]
        return tinker.SampleResponse(sequences=made, prompt_logprobs_np=scored)

    async def sample_async(self, *arguments: Any, **options: Any) -> tinker.SampleResponse:
        """The name of `sample` in older releases."""
        return await self.sample(*arguments, **options)

    async def compute_logprobs(self, prompt: tinker.ModelInput) -> list[float | None]:
        """Raw log-probabilities of the prompt's tokens; None for the first."""
        return [None, *(await self._scores(prompt.to_ints()))[1:].tolist()]

    async def compute_logprobs_async(self, prompt: tinker.ModelInput) -> list[float | None]:
        """The name of `compute_logprobs` in older releases."""
        return await self.compute_logprobs(prompt)

    async def _scores(self, ids: list[int]) -> t.FloatArray:
        return (await self._client.score([ids], self._adapter))[0, 0]

    async def _sample_until(
        self, strings: list[str], ids: list[int], count: int, options: t.GenerateOptions
    ) -> list[tinker.SampledSequence]:
        """One request a sample, each of them ended at its stop string; they share the prompt."""
        if self._text is None:
            raise ValueError("stop strings need the tokenizer: pass `text`")
        text = self._text

        async def one(index: int) -> tinker.SampledSequence:
            found = text.stream(stop=strings, skip_special_tokens=False)
            tokens: list[t.IntArray] = []
            logprobs: list[t.FloatArray] = []
            reason: t.FinishReason | None = None
            seed = options["seed"]
            own: t.GenerateOptions = {**options, "seed": None if seed is None else seed + index}
            async with self._client.stream(ids, **own) as deltas:
                async for delta in deltas:
                    tokens.append(delta.token_ids)
                    if delta.logprobs is not None:
                        logprobs.append(delta.logprobs)
                    found.push(delta.token_ids)
                    if found.stopped is not None:
                        reason = t.FinishReason.STOP
                        break
                    if delta.finish is not None:
                        reason = delta.finish.reason
            end = found.count if found.stopped is not None else None
            return _sequence(
                str(index), np.concatenate(tokens)[:end], np.concatenate(logprobs)[:end], reason
            )

        return list(await asyncio.gather(*map(one, range(count))))


def _sequence(
    name: str,
    tokens: t.IntArray,
    logprobs: t.FloatArray | None,
    reason: t.FinishReason | None,
) -> tinker.SampledSequence:
    if reason not in _ENDS:
        raise RuntimeError(f"the sample ended with {reason}")
    return tinker.SampledSequence(
        stop_reason=_ENDS[reason], sequence_id=name, tokens_np=tokens, logprobs_np=logprobs
    )
