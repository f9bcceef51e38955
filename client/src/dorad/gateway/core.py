"""What all of the gateway's doors share: clients, the model's facts, limits, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import dorad.aio
from dorad import types as t
from dorad.gateway.admission import Admission
from dorad.gateway.answers import Answers
from dorad.gateway.callers import Caller
from dorad.gateway.errors import Refusal
from dorad.gateway.metrics import Metrics
from dorad.text import ModelText

_MODEL_SECONDS = 10.0  # A server that was started again may hold another model.
_LONG_TEXT = 4096  # Characters from which on tokenizing leaves the event loop alone.


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request, and all together, may take of the gateway."""

    body_bytes: int = 4 << 20
    choices: int = 128
    """Prompts times n."""
    requests: int = 1024
    """In flight."""
    timeout: float = 600.0
    """Seconds for one request."""
    body_seconds: float = 30.0
    """For a request's body to arrive."""

    @property
    def answer_seconds(self) -> float:
        """For an answer to be taken: `timeout`, and the last message, which may tell of it."""
        return self.timeout + 1.0


class Places:
    """Room for so many requests at a time."""

    def __init__(self, count: int, metrics: Metrics) -> None:
        self._free = count
        self._metrics = metrics

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Raises Refusal when there is none."""
        if self._free == 0:
            message = "the gateway has as many requests in flight as it may"
            raise Refusal(429, "GATEWAY_BUSY", message, retry_after=1)
        self._free -= 1
        self._metrics.in_flight.inc()
        try:
            yield
        finally:
            self._free += 1
            self._metrics.in_flight.dec()


class Gateway:
    """One server as seen through the gateway. For one event loop.

    Args:
      own: for what the gateway itself asks, the model's facts and health. Its connection carries
        callers' requests as well, each with its caller's metadata alone.
      text: the model's tokenizer; None: token ids only.
      exposed: as Admission's.

    Does not own the client.
    """

    def __init__(
        self,
        own: dorad.aio.Client,
        text: ModelText | None,
        limits: Limits,
        *,
        exposed: bool = False,
    ) -> None:
        self.own = own
        self.text = text
        self.limits = limits
        self.metrics = Metrics()
        self.places = Places(limits.requests, self.metrics)
        self.started = int(time.time())
        self.admission = Admission(own, exposed=exposed)
        self._model: Answers[None, t.ModelInfo] = Answers(seconds=_MODEL_SECONDS)

    def client_of(self, caller: Caller) -> dorad.aio.Client:
        return self.own.with_metadata(caller.metadata)

    async def model(self) -> t.ModelInfo:
        """Raises DoradError when the server cannot say."""
        return await self._model.get(None, self._ask)

    async def _ask(self) -> t.ModelInfo:
        return (await self.own.info(timeout=5)).model

    async def adapter_of(self, model: str) -> str | None:
        """The adapter that a request's `model` names; None: the base model."""
        if not model:
            raise Refusal(404, "MODEL_NOT_FOUND", "model is empty", param="model")
        return None if model == (await self.model()).name else model

    async def healthy(self) -> bool:
        try:
            return await self.own.health(timeout=5) == "serving"
        except dorad.DoradError:
            return False

    def needs_text(self) -> ModelText:
        """Raises Refusal without a tokenizer."""
        if self.text is None:
            message = (
                "this gateway has no tokenizer (--tokenizer): it serves token ids only, by the "
                "Open Inference Protocol (/v2); texts and OpenAI's API need one"
            )
            raise Refusal(400, "TOKENIZER_NOT_CONFIGURED", message)
        return self.text

    async def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        tokenizer = self.needs_text()
        if len(text) < _LONG_TEXT:
            return tokenizer.encode(text, special_tokens=special_tokens)
        return await asyncio.to_thread(tokenizer.encode, text, special_tokens=special_tokens)

    def check_choices(self, prompts: Sequence[Any], n: int) -> None:
        if len(prompts) * n > self.limits.choices:
            message = (
                f"{len(prompts)} prompts with {n} choices each are more than "
                f"{self.limits.choices} choices"
            )
            raise Refusal(400, "CHOICES_TOO_MANY", message, param="n")
