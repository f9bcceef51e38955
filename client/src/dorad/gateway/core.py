"""State that all endpoints share: the client, facts about the model, limits and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dorad import types as t
from dorad.gateway.admission import Admission
from dorad.gateway.answers import Answers
from dorad.gateway.callers import Caller
from dorad.gateway.errors import Refusal
from dorad.gateway.images import Images
from dorad.gateway.log import log_access
from dorad.gateway.metrics import Metrics
from dorad.gateway.servers import Calls, Servers
from dorad.gateway.statistics import Statistics
from dorad.text import ModelText

_MODEL_SECONDS = 10.0  # A restarted server may hold another model.
LONG_TEXT = 4096  # Characters or tokens. Longer ones are tokenized or decoded in a thread.


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one request and of the whole gateway."""

    body_bytes: int = 4 << 20
    choices: int = 128
    """Maximum of prompts times n."""
    requests: int = 1024
    """Maximum number of requests in flight."""
    timeout: float = 600.0
    """Time limit of one request in seconds."""
    body_seconds: float = 30.0
    """Time limit for the arrival of a body in seconds."""

    @property
    def answer_seconds(self) -> float:
        """Time limit for reading an answer: `timeout`, plus time for the error message about it."""
        return self.timeout + 1.0


RL_LIMITS = Limits(body_bytes=256 << 20, choices=16384, requests=16384)
"""For the whole batch of a step at once."""


class Places:
    """Limits the number of requests in flight."""

    def __init__(self, count: int, metrics: Metrics) -> None:
        self._free = count
        self._metrics = metrics

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Raises Refusal at the limit."""
        if self._free == 0:
            message = "the gateway is at its limit of requests in flight (--max-requests)"
            raise Refusal(429, "GATEWAY_BUSY", message, retry_after=1)
        self._free -= 1
        self._metrics.in_flight.inc()
        try:
            yield
        finally:
            self._free += 1
            self._metrics.in_flight.dec()


class Gateway:
    """The state of one gateway process. Use it from one event loop. It does not own the servers.

    Args:
      servers: also answer the gateway's own questions about the model. Calls for callers share
        their connections, each with its caller's metadata only.
      text: the model's tokenizer; None: token ids only.
      exposed: see Admission.
      logprobs_mode: of requests that do not choose one.
      served_model_name: the base model's id. "": the name of its folder.
      image_roots: files of images are read below these folders only.
    """

    def __init__(
        self,
        servers: Servers,
        text: ModelText | None,
        limits: Limits,
        *,
        exposed: bool = False,
        logprobs_mode: t.LogprobMode = "raw",
        served_model_name: str = "",
        image_roots: Sequence[Path] = (),
    ) -> None:
        self.servers = servers
        self.text = text
        self.images = Images(text, image_roots)
        self.limits = limits
        self.logprobs_mode = logprobs_mode
        self._served_model_name = served_model_name
        self.metrics = Metrics(servers)
        self.statistics = Statistics()
        self.places = Places(limits.requests, self.metrics)
        self.started = int(time.time())
        self.admission = Admission(servers, exposed=exposed)
        self._info: Answers[None, t.ServerInfo] = Answers(seconds=_MODEL_SECONDS)

    def client_of(self, caller: Caller) -> Calls:
        return self.servers.of(caller.metadata)

    def count_tokens(self, caller: Caller, prompt: int, completion: int) -> None:
        """Once for each request."""
        self.metrics.count_tokens(prompt, completion)
        caller.record.prompt_tokens, caller.record.completion_tokens = prompt, completion

    def ended(
        self, endpoint: str, caller: Caller, code: str, began: float, *, public: bool = False
    ) -> None:
        """Counts a request and writes its line of the access log. `began` is of monotonic()."""
        seconds = time.monotonic() - began
        self.metrics.requests.labels(endpoint, code).inc()
        self.metrics.seconds.labels(endpoint).observe(seconds)
        record = caller.record
        log_access(
            logging.DEBUG if public else logging.INFO,
            request_id=caller.request_id,
            peer=record.peer,
            endpoint=endpoint,
            model=record.model,
            status=code,
            reason=record.reason,
            prompt_tokens=record.prompt_tokens,
            completion_tokens=record.completion_tokens,
            seconds=round(seconds, 6),
            received_bytes=record.received_bytes,
            sent_bytes=record.sent_bytes,
        )

    async def model(self) -> t.ModelInfo:
        """Facts about the model. Raises DoradError when the call fails."""
        return (await self.info()).model

    async def info(self) -> t.ServerInfo:
        """Facts about a server. Raises DoradError when the call fails."""
        return await self._info.get(None, self._ask)

    async def _ask(self) -> t.ServerInfo:
        info = await self.servers.of().info(timeout=5)
        name = self._served_model_name
        if not name:
            return info
        return dataclasses.replace(info, model=dataclasses.replace(info.model, name=name))

    async def with_model(self, body: dict[str, Any]) -> dict[str, Any]:
        """With --rl a request without `model` is for the base model, as in vLLM."""
        if self.servers.rl is None or body.get("model") is not None:
            return body
        return {**body, "model": (await self.model()).name}

    async def adapter_of(self, model: str) -> str | None:
        """The adapter for a request's `model` field. None: the base model."""
        if not model:
            raise Refusal(404, "MODEL_NOT_FOUND", "model is empty", param="model")
        return None if model == (await self.model()).name else model

    async def healthy(self) -> bool:
        """Whether at least one server takes requests."""
        return await self.servers.serving()

    def needs_text(self) -> ModelText:
        """Raises Refusal without a tokenizer."""
        if self.text is None:
            message = (
                "this gateway has no tokenizer (--tokenizer): it takes and returns token ids only, "
                "by /v1/completions and the Open Inference Protocol (/v2); texts, stop strings and "
                "chats need one"
            )
            raise Refusal(400, "TOKENIZER_NOT_CONFIGURED", message)
        return self.text

    async def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        tokenizer = self.needs_text()
        if len(text) < LONG_TEXT:
            return tokenizer.encode(text, special_tokens=special_tokens)
        return await asyncio.to_thread(tokenizer.encode, text, special_tokens=special_tokens)

    def check_choices(self, prompts: Sequence[Any], n: int) -> None:
        if len(prompts) * n > self.limits.choices:
            message = (
                f"{len(prompts)} prompts with {n} choices each are more than "
                f"{self.limits.choices} choices"
            )
            raise Refusal(400, "CHOICES_TOO_MANY", message, param="n")
