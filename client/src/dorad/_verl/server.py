"""The Ray actor of a replica: it runs a server, and generates from the policy published last."""

from __future__ import annotations

import asyncio
import math
import os
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig
from verl.workers.rollout.replica import TokenOutput

from dorad import (
    AdapterVersion,
    Answers,
    FinishReason,
    GenerateRequest,
    NotFound,
    Sample,
    _processor_images,
)
from dorad._local_server import local_server, model_folder
from dorad._origin import check_origin
from dorad._prompt_seeds import PromptSeeds
from dorad._unsupported import UnsupportedError
from dorad._verl import settings
from dorad._verl.gate import Gate
from dorad.aio import Client

_RETRY_SECONDS = 60.0
_ABORT_SECONDS = 0.2
_TAGS = {"weights": "weights", "kv_cache": "kv"}  # verl's names


class Policy(NamedTuple):
    """What `generate` samples from."""

    version: AdapterVersion
    global_steps: int | None


def actor_name(replica_rank: int, suffix: str = "") -> str:
    """Of the replica's server."""
    return f"dorad_server_{replica_rank}_0{suffix}"


class Server:
    """Its methods are those that verl calls on a rollout's server. They run on one event loop."""

    def __init__(self, config: Any, model_config: Any, gpu: str | None, replica_rank: int) -> None:
        """`gpu`: the device's number or UUID for CUDA_VISIBLE_DEVICES; None: the CPU."""
        self._config = omega_conf_to_dataclass(config)
        self._model = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        self._gpu = gpu
        self._replica_rank = replica_rank
        self._gate = Gate()
        self._policy: Policy | None = None
        self._seeds = PromptSeeds()  # Restarted with each policy.
        self._interruptions = 0  # times that a policy may have changed among a prompt's samples
        self._answers: Answers | None = None
        self._target = ""
        self._context_length = 0
        self._takes_images = False
        self._placed = _processor_images.Placed(self._model.processor, self._model.hf_config)
        self._stack = ExitStack()
        weakref.finalize(self, self._stack.close)  # Also at the process's end.

    # --- The server -------------------------------------------------------------------------------

    async def launch_server(self) -> None:
        """Starts it; returns when it is ready."""
        self._target = await asyncio.to_thread(self._start)
        async with Client(self._target) as client:
            info = await client.info()
        self._client = Client(self._target, shared_memory=info.shared_memory_socket or None)
        self._takes_images = info.limits.max_images > 0 and self._model.processor is not None
        self._context_length = info.model.context_length
        if settings.keeps_answers(self._config):
            self._answers = Answers(max_draft_tokens=info.limits.max_draft_tokens)
        longest = self._config.prompt_length + self._config.response_length
        if longest > self._context_length:
            raise UnsupportedError(
                [
                    f"rollout.prompt_length + rollout.response_length = {longest} exceeds the "
                    f"server's context of {self._context_length} tokens"
                ]
            )

    def _start(self) -> str:
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="dorad-verl-"))
        values = settings.server_settings(self._config, "cpu" if self._gpu is None else "cuda")
        values.setdefault("server.shared_memory_socket", os.path.join(folder, "memory.sock"))
        environment = {} if self._gpu is None else {"CUDA_VISIBLE_DEVICES": self._gpu}
        model = model_folder(self._model.local_path)
        server = local_server(model, values, environment=environment)
        return self._stack.enter_context(server)

    async def target(self) -> str:
        """The server's address, on this host."""
        return self._target

    # --- The policy -------------------------------------------------------------------------------

    async def set_policy(self, version: AdapterVersion, global_steps: int | None) -> None:
        """Requests sample from this version from now on; the one before is retired. Those that
        have it keep it until they end."""
        before, self._policy = self._policy, Policy(version, global_steps)
        self._seeds.restart()
        if self._gate.inside:
            self._interruptions += 1
        if before is not None:
            with suppress(NotFound):
                await self._client.retire(before.version.ref)

    async def set_global_steps(self, global_steps: int) -> None:
        """The weights have not changed."""
        if self._policy is not None:
            self._policy = self._policy._replace(global_steps=global_steps)

    # --- Generation -------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        priority: int = 0,
    ) -> TokenOutput:
        """One answer. "aborted": with the tokens so far, or the gate refuses requests.

        Args:
          image_data: the prompt's pictures, for verl's processor; `prompt_ids` has all of their
            placeholders.
          mm_processor_kwargs: options of the processor.

        Raises:
          UnexpectedVersion: a token is not of the version that was published for these steps.
        """
        # Agent loops send empty lists, and options of a processor that there is not.
        if video_data or audio_data:
            raise UnsupportedError(["a prompt has videos or sounds: the server has images"])
        if image_data and not self._takes_images:
            raise UnsupportedError(["a prompt has images: the server generates from text alone"])
        async with self._gate.entered(request_id) as entered:
            policy = self._policy
            if policy is None:
                raise RuntimeError("no policy has been published: verl must update weights first")
            if not entered:
                return _output([], None, "aborted", policy)
            prompt = [int(token) for token in prompt_ids]
            options = settings.request_options(
                self._config, prompt, sampling_params, self._context_length
            )
            options["bad_words"] = _processor_images.unsampled(self._model.hf_config) or None
            if image_data:
                options["images"] = await asyncio.to_thread(
                    self._placed, prompt, image_data, **dict(mm_processor_kwargs or {})
                )
            base = self._seeds_of(policy, request_id)
            if base is not None and "seed" not in options:
                options["seed"] = self._seeds.next(base, prompt, options.get("images"))
            request = GenerateRequest(
                prompt, adapter=policy.version.ref, priority=priority, **options
            )
            ((sample,),) = await self._client.generate_many(
                [request], answers=self._answers, timeout=math.inf, retry_for=_RETRY_SECONDS
            )
        return _answer(sample, policy)

    def _seeds_of(self, policy: Policy, request_id: str) -> str | None:
        """What a seed depends on besides the prompt and the sample's number; None: it is random."""
        seed = self._config.seed
        if self._answers is not None:
            # Not on the step: a prompt that comes again has its seeds again. Samples of one prompt
            # need different ones, also from several servers, and when the policy changes between
            # them.
            return f"{seed} {self._replica_rank} {self._interruptions}"
        if self._config.full_determinism:
            # verl's ids are the same in every run, but samples of one prompt may share an id.
            return f"{seed} {policy.global_steps} {request_id}"
        return None

    async def abort_all_requests(
        self, reset_prefix_cache: bool = True, reject_request: bool = False
    ) -> dict[str, Any]:
        """Ends all requests with the tokens so far; new ones wait for `resume_generation`, or are
        refused."""
        await self._gate.close(refuse=reject_request)
        self._interruptions += 1
        aborted = self._gate.inside
        while self._gate.inside:
            await self._client.abort(all=True)
            # Some may not have reached the server yet.
            with suppress(TimeoutError):
                await asyncio.wait_for(self._gate.emptied(), _ABORT_SECONDS)
        return {"aborted_count": len(aborted), "request_ids": aborted}

    async def resume_generation(self) -> None:
        await self._gate.open()

    # --- Memory -----------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """Releases the GPU's memory when no request runs."""
        await self._release("kv", "weights")

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Takes it again: "weights", "kv_cache", or both."""
        await self._client.wake(*(_TAGS[tag] for tag in tags or _TAGS))  # type: ignore[arg-type]

    async def release_kv_cache(self) -> None:
        await self._release("kv")

    async def resume_kv_cache(self) -> None:
        await self.wake_up(["kv_cache"])

    async def clear_kv_cache(self) -> None:
        """Nothing: a cached prefix is of one version, none is stale."""

    async def _release(self, *tags: Any) -> None:
        if self._config.free_cache_engine:
            await self._gate.emptied()
            await self._client.sleep(*tags)

    # --- Profiles ---------------------------------------------------------------------------------

    async def start_profile(self, **options: Any) -> None:
        """Nothing: rollout.profiler.enable is refused. verl calls it for its trainer's profiles."""

    async def stop_profile(self) -> None:
        """Nothing."""


def _answer(sample: Sample, policy: Policy) -> TokenOutput:
    check_origin(sample, policy.version)
    if sample.finish_reason is FinishReason.NON_FINITE:
        raise RuntimeError(f"the policy's logits are not finite: {sample.detail}")
    aborted = sample.finish_reason is FinishReason.ABORTED
    output = _output(
        sample.token_ids.tolist(),
        None if sample.logprobs is None else sample.logprobs.tolist(),
        "aborted" if aborted else "completed",
        policy,
    )
    output.num_preempted = sample.usage.preemptions
    output.extra_fields["num_cached_tokens"] = sample.usage.cached_prompt_tokens
    return output


def _output(
    tokens: list[int], logprobs: list[float] | None, reason: str, policy: Policy
) -> TokenOutput:
    return TokenOutput(
        token_ids=tokens,
        log_probs=logprobs,
        stop_reason=reason,
        extra_fields={"global_steps": policy.global_steps},
    )
