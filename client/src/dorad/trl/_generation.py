"""The object that stands in for TRL's VLLMGeneration: it publishes the policy and samples from it.

Not thread-safe; a trainer uses it from one thread. With several processes each has one: the main
one talks to the server, all take part in every method.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import tempfile
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

from accelerate.utils import broadcast_object_list, gather_object

from dorad import (
    AdapterVersion,
    Answers,
    Client,
    FinishReason,
    GenerateRequest,
    Image,
    NotFound,
    SharedTensors,
    _processor_images,
)
from dorad._local_server import local_server, model_folder
from dorad._origin import check_origin
from dorad._prompt_seeds import PromptSeeds, seed_of
from dorad._unsupported import UnsupportedError
from dorad.trl import _policy
from dorad.trl._options import Options

T = TypeVar("T")
Prompt = tuple[list[int], list[Any]]  # token ids, pictures
Prompts = Sequence[Sequence[Prompt]]  # of each process
Drawn = tuple[list[int], list[float] | None]  # tokens, log-probabilities

logger = logging.getLogger("dorad.trl")

# Of trainers whose teacher's server is another one than that which samples.
_TEACHER_ADDRESS = "teacher_model_server_url"
_ATTEMPTS = 3  # of a generation whose version the server has lost


@dataclass(frozen=True)
class Server:
    """Where samples come from; the arguments of `served`."""

    target: str | Client | None = None
    adapter: str | None = None
    shared_memory: bool = False
    settings: Mapping[str, object] = field(default_factory=dict)
    answers: Answers | None = None


class Generation:
    """Samples of the trained adapter, from a dorad server.

    TRL's trainer calls `sync_weights` when the weights have changed and `generate` for each batch
    of prompts. A rollout function of yours may call `generate`, too.

    Attributes:
      version: the published version from which `generate` samples.
      client: the connection of the main process; None in others.
    """

    def __init__(
        self,
        trainer: Any,
        server: Server,
        model: Any,
        accelerator: Any,
        processing_class: Any,
        **options: Any,
    ) -> None:
        self._trainer = trainer
        self._accelerator = accelerator
        self._model = model
        self._options = Options(**options)
        found = _policy.problems(model) + self._options.problems()
        args = trainer.args
        if getattr(args, "use_teacher_server", False) and not hasattr(args, _TEACHER_ADDRESS):
            found.append("use_teacher_server: it asks a vLLM that samples, too; set it to False")
        if found:
            raise UnsupportedError(found)
        self._processor = processing_class
        self._policy = _policy.Policy(model)
        self._name = server.adapter or f"trl-{uuid.uuid4().hex[:12]}"
        self._request_options = self._options.request_options(_eos_token_ids(trainer)) | {
            "bad_words": _processor_images.unsampled(model.config) or None
        }
        self._answers = server.answers
        self._step = -1  # of the last call of `generate`: the counts below are this step's
        self._calls: Counter[bool] = Counter()  # by whether they train
        self._prompt_seeds = PromptSeeds()
        self.client: Client | None = None
        self._shared: SharedTensors | None = None
        self._max_n = 1
        self._max_images = 0
        self._context_length = 0
        self.version: AdapterVersion | None = None
        self._stack = ExitStack()
        # Also at the process's end, but not at that of a child.
        self._closed = weakref.finalize(self, _close, self._stack, os.getpid())
        try:
            self._context_length = self._on_main(lambda: self._connect(server))
            self.sync_weights()
        except BaseException:
            self.close()
            raise
        for warning in _warnings(trainer, model):
            logger.warning(warning)
        # TRL reads these of a vLLM.
        engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=self._context_length))
        self.llm = SimpleNamespace(llm_engine=engine)
        self.vllm_client = SimpleNamespace(
            get_server_info=lambda: {"model_config": {"logprobs_mode": "processed_logprobs"}}
        )

    def close(self) -> None:
        """Ends the connection, and the server if `served` started one. Idempotent."""
        self._closed()

    # --- The server -------------------------------------------------------------------------------

    def _connect(self, server: Server) -> int:
        """The main process's connection; returns the server's context length."""
        target, shared_memory = server.target, server.shared_memory
        if target is None:
            target = self._stack.enter_context(self._own_server(server.settings))
            shared_memory = True
        with ExitStack() as first:
            asked = first.enter_context(Client(target)) if isinstance(target, str) else target
            asked.wait_ready(self._options.server_timeout)
            info = asked.info()
        self._check(info)
        if shared_memory:
            if not info.shared_memory_socket:
                raise ValueError(
                    f"shared_memory: {asked.target} has no server.shared_memory_socket"
                )
            self._shared = self._stack.enter_context(SharedTensors(info.shared_memory_socket))
        if isinstance(target, str):
            pixels = info.shared_memory_socket if shared_memory else None
            target = self._stack.enter_context(Client(target, shared_memory=pixels))
        self.client = target
        self._max_n = info.limits.max_n
        self._max_images = info.limits.max_images
        return info.model.context_length

    def _check(self, info: Any) -> None:
        config = self._model.config.get_text_config()
        ours = (config.vocab_size, config.hidden_size, config.num_hidden_layers)
        theirs = (info.model.vocab_size, info.model.hidden_size, info.model.num_layers)
        found = []
        if ours != theirs:
            found.append(
                f"the server's model {info.model.name} is another one: its vocabulary, hidden size "
                f"and layers are {theirs}, the trainer's {ours}"
            )
        longest = self._options.max_model_length
        if longest is not None and longest > info.model.context_length:
            found.append(
                f"vllm_max_model_length={longest} exceeds the server's context of "
                f"{info.model.context_length} tokens"
            )
        if found:
            raise UnsupportedError(found)

    def _own_server(self, settings: Mapping[str, object]) -> AbstractContextManager[str]:
        """A server over the files of the trainer's model, on the trainer's device."""
        device = self._accelerator.device
        values: dict[str, object] = {"model.device": device.type}
        environment = {}
        if device.type == "cuda":
            values["memory.vram_limit"] = float(self._options.gpu_memory_utilization)
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            index = device.index or 0
            environment["CUDA_VISIBLE_DEVICES"] = (
                visible.split(",")[index] if visible else str(index)
            )
        if not _in_bf16(self._trainer):
            values["model.compute_dtype"] = "fp32"
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="dorad-trl-"))
        values["server.shared_memory_socket"] = os.path.join(folder, "memory.sock")
        model = model_folder(self._model.config.name_or_path)
        return local_server(model, values | dict(settings), environment=environment)

    # --- TRL's calls ------------------------------------------------------------------------------

    def sync_weights(self) -> None:
        """Publishes the policy as it is now. `generate` then samples from exactly this version."""
        self._wake("weights")
        main = self._accelerator.is_main_process
        tensors = self._policy.tensors(self._trainer.model_wrapped, keep=main)
        self.version = self._on_main(lambda: self._publish(tensors))

    def _publish(self, tensors: Mapping[str, Any]) -> AdapterVersion:
        assert self.client is not None
        options: dict[str, Any] = {
            "tensors": tensors,
            "config": self._policy.config,
            "keep_last": 0,  # A name's other versions may be another trainer's.
            "pinned": True,
            "timeout": math.inf,
            "retry_for": self._options.server_timeout,
        }
        if self._shared is None:
            version = self.client.publish(self._name, **options)
        else:
            version = self.client.publish_from_memory(
                self._name, shared_memory=self._shared, **options
            )
        if self.version is not None:
            with contextlib.suppress(NotFound):  # The server has restarted.
                self.client.retire(self.version.ref)
        return version

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        images: Sequence[Any] | None,
        num_generations: int,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> tuple[Any, Any, Any, Any]:
        """One sample for each prompt of this process; equal prompts are one request.

        Args:
          prompts: token ids, each prompt as often as it gets samples.
          images: None, or for each prompt None or its pictures, for the trainer's processor.
          num_generations: how often; the prompts themselves tell it.
          profiler: measures the call.

        Returns:
          (prompts, token ids, log-probabilities, token ids), the latter two as lists of one entry
          for each token, and None if the trainer wants none.

        Raises:
          UnexpectedVersion: tokens are not the published version's.
          UnsupportedError: the server takes no images.
        """
        with profiler or nullcontext():
            draw = self._next_draw()
            pictures = images or [None] * len(prompts)
            own_prompts = [
                (list(prompt), list(some or ()))
                for prompt, some in zip(prompts, pictures, strict=True)
            ]
            ranks = gather_object([own_prompts])
            samples = self._sampled(ranks, draw)
        begin = sum(len(rank) for rank in ranks[: self._accelerator.process_index])
        own = samples[begin : begin + len(prompts)]
        tokens = [tokens for tokens, _ in own]
        if self._options.logprobs is None:
            return prompts, tokens, None, None
        logprobs = [[[value] for value in values or ()] for _, values in own]
        return prompts, tokens, logprobs, [[[token] for token in ids] for ids in tokens]

    def _sampled(self, ranks: Prompts, draw: str) -> list[Drawn]:
        """A sample for each prompt of all processes, in order."""
        for _ in range(_ATTEMPTS):
            samples = self._on_main(lambda: self._sample(ranks, draw))
            if samples is not None:
                return samples
            logger.warning("the server has lost %s; it is published again", self._name)
            self.sync_weights()
        raise NotFound(f"the server loses every version of {self._name}", code="NOT_FOUND")

    def _sample(self, ranks: Prompts, draw: str) -> list[Drawn] | None:
        """On the main process. None: the server has lost the version."""
        assert self.client is not None and self.version is not None
        prompts = [prompt for rank in ranks for prompt in rank]
        places: dict[Hashable, list[int]] = {}
        for place, (ids, pictures) in enumerate(prompts):
            key = tuple(ids), tuple(map(_processor_images.identity, pictures))
            places.setdefault(key, []).append(place)
        seeds = self._prompt_seeds.copy()  # Another attempt has the same ones.
        requests, targets = [], []
        for wanted in places.values():
            ids, pictures = prompts[wanted[0]]
            images = self._placed(ids, pictures)
            for begin in range(0, len(wanted), self._max_n):
                targets.append(wanted[begin : begin + self._max_n])
                if self._answers is None:
                    seed = seed_of(f"{draw} {targets[-1][0]}")
                else:
                    seed = seeds.next(draw, ids, images)
                requests.append(
                    GenerateRequest(
                        ids,
                        images=images,
                        adapter=self.version.ref,
                        n=len(targets[-1]),
                        seed=seed,
                        **self._request_options,
                    )
                )
        self._wake("weights", "kv")
        try:
            answers = self.client.generate_many(
                requests,
                answers=self._answers,
                timeout=math.inf,
                retry_for=self._options.server_timeout,
            )
        except NotFound:
            return None
        finally:
            self._sleep()
        self._prompt_seeds = seeds
        samples: dict[int, Drawn] = {}
        for target, answer in zip(targets, answers, strict=True):
            for place, sample in zip(target, answer, strict=True):
                check_origin(sample, self.version)
                if sample.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
                    raise RuntimeError(
                        f"a sample ended early: {sample.finish_reason} {sample.detail}"
                    )
                values = None if sample.logprobs is None else sample.logprobs.tolist()
                samples[place] = sample.token_ids.tolist(), values
        return [samples[place] for place in range(len(samples))]

    def _placed(self, token_ids: list[int], pictures: list[Any]) -> list[Image] | None:
        if not pictures:
            return None
        if not self._max_images:
            raise UnsupportedError(["a prompt has images: the server generates from text alone"])
        return _processor_images.placed(self._processor, self._model.config, token_ids, pictures)

    # --- Seeds ------------------------------------------------------------------------------------

    def _next_draw(self) -> str:
        """Names a call of `generate`: another one at every step and call, and the same in a run
        that was resumed. Evaluation does not change those of training.

        With `answers` the same one at every step: a prompt that comes again has its seed again. A
        prompt's further requests of one step have further seeds."""
        seed = self._options.further.get("seed", self._trainer.args.seed)
        step, training = self._trainer.state.global_step, bool(self._model.training)
        if step != self._step:
            self._step = step
            self._calls.clear()
            self._prompt_seeds.restart()
        if self._answers is not None:
            return f"{seed} {training}"
        self._calls[training] += 1
        return f"{seed} {step} {training} {self._calls[training]}"

    # --- Sleep ------------------------------------------------------------------------------------

    def _wake(self, *tags: Any) -> None:
        if self._options.enable_sleep_mode and self.client is not None:
            self.client.wake(*tags)

    def _sleep(self) -> None:
        if self._options.enable_sleep_mode and self.client is not None:
            self.client.sleep("kv", "weights")

    # --- Processes --------------------------------------------------------------------------------

    def _on_main(self, function: Callable[[], T]) -> T:
        """The main process's result in every process; its failure, too."""
        error: BaseException | None = None
        answer: list[Any] = [None, ""]
        if self._accelerator.is_main_process:
            try:
                answer = [function(), ""]
            except Exception as failure:
                error = failure
                answer = [None, f"{type(failure).__name__}: {failure}"]
        broadcast_object_list(answer)
        if error is not None:
            raise error
        if answer[1]:
            raise RuntimeError(f"the main process failed: {answer[1]}")
        result: T = answer[0]
        return result


def _close(stack: ExitStack, process: int) -> None:
    if os.getpid() == process:
        stack.close()


def _eos_token_ids(trainer: Any) -> list[int]:
    """The tokens that end a completion for the trainer."""
    found = getattr(trainer, "eos_token_ids", None)
    if found is None:
        model = getattr(trainer.model.generation_config, "eos_token_id", None)
        tokenizer = getattr(trainer.processing_class, "eos_token_id", None)
        found = [*(model if isinstance(model, (list, tuple)) else [model]), tokenizer]
    return sorted({int(token) for token in found if token is not None})


def _in_bf16(trainer: Any) -> bool:
    return bool(getattr(trainer.args, "bf16", False)) or "bfloat16" in str(trainer.model.dtype)


def _warnings(trainer: Any, model: Any) -> Iterator[str]:
    args = trainer.args
    dropouts = {m.p for m in model.modules() if type(m).__name__ == "Dropout" and m.p > 0}
    if dropouts and not getattr(args, "disable_dropout", False):
        yield (
            f"the trainer drops out ({max(dropouts):g}), the server does not: samples are not from "
            "the trained policy. Set lora_dropout=0 or disable_dropout=True"
        )
    mode = getattr(args, "vllm_importance_sampling_mode", "")
    if _in_bf16(trainer) and mode.startswith("sequence"):
        yield (
            f"bf16 rounds log-probabilities by some hundredths a token, and {mode} adds them up "
            "over a sequence. Set vllm_importance_sampling_mode='token_truncate'"
        )
