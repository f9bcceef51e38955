"""Generation and scoring."""

from __future__ import annotations

import math
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar, Unpack, overload

from grpc_health.v1 import health_pb2

from dorad import _samples, _wire
from dorad import types as t
from dorad._aio.calls import RunningCalls
from dorad._aio.connection import Connection
from dorad._aio.images import CallImages
from dorad._aio.stream import Stream
from dorad._asyncio import AsDoradErrors, read, run_calls
from dorad._channel import PROBE_SECONDS
from dorad._retry import Attempts
from dorad.answers import Answers
from dorad.errors import DeadlineExceeded, DoradError, Unavailable

T = TypeVar("T")


class Inference(Connection):
    """The methods of the inference service."""

    async def generate(
        self,
        token_ids: t.TokenIds,
        *,
        timeout: float | None = None,
        retry_for: float | None = None,
        **options: Unpack[t.GenerateOptions],
    ) -> list[t.Sample]:
        """Samples continuations of a prompt and waits for all of them.

        If the connection breaks meanwhile, the whole request is sent again, under the same id.

        Args:
          token_ids: the prompt, at least one token.
          timeout: seconds; None: the client's default, math.inf: none.
          retry_for: seconds to go on after a failure; None: the client's default.
          **options: see `GenerateOptions` (adapter, n, max_tokens, temperature, seed, logprobs, …).

        Returns:
          n samples in order of their index; token_ids int32 [tokens], logprobs float32 [tokens].

        Raises:
          InvalidArgument: with every problem in `violations`.
          NotFound: no such adapter or version.
          Overloaded: the server's queue is full.
        """
        request = t.GenerateRequest(token_ids, **options)
        return await self._generate(
            request,
            self._attempts(timeout, retry_for),
            self._calls,
            complete=bool(self._patience(retry_for)),
        )

    async def _generate(
        self,
        request: t.GenerateRequest,
        attempts: Attempts,
        calls: RunningCalls,
        *,
        complete: bool = False,
    ) -> list[t.Sample]:
        """`complete`: samples aborted by the server's end are an error, not a result."""
        message = self._named(_wire.generate_request(request, stream=False))
        images = CallImages(self._images, request.images or ())

        async def attempt(message: Any) -> list[t.Sample]:
            call = self._start(self._inference.Generate, message, attempts.budget.left)
            samples = _samples.Samples(request)
            with calls.running(call), AsDoradErrors():
                if images.announced:
                    await call.initial_metadata()  # Comes before the answer: the server has them.
                    images.arrived()
                while (answer := await read(call)) is not None:
                    samples.add(answer)
            done = samples.finish()
            if complete and any(s.finish_reason is t.FinishReason.ABORTED for s in done):
                await self._check_serving()
            return done

        async def run() -> list[t.Sample]:
            return await self._with_images(images, message, attempts, attempt)

        return await self._repeat(attempts, run, calls)

    async def _with_images(
        self,
        images: CallImages,
        message: Any,
        attempts: Attempts,
        attempt: Callable[[Any], Awaitable[T]],
    ) -> T:
        """Runs an attempt with the message and the pixels that the server lacks, and once more for
        images that it does not have any more."""
        while True:
            try:
                result = await attempt(await images.message_in_turn(message, attempts.budget))
            except DoradError as error:
                if not images.lacking(error):
                    raise
            else:
                images.arrived()
                return result
            finally:
                images.release()

    def _named(self, message: Any) -> Any:
        """The request, with an id for all its attempts: the server refuses an id that is in use, so
        no attempt runs beside the one before."""
        if not message.HasField("request_id") and not self._sends_request_id:
            message.request_id = uuid.uuid4().hex
        return message

    async def _check_serving(self) -> None:
        """Raises Unavailable if the server is ending: then the abort was not a caller's."""
        question = health_pb2.HealthCheckRequest()
        try:
            answer = await self._call(self._health.Check, question, PROBE_SECONDS)
            serving = answer.status == health_pb2.HealthCheckResponse.SERVING
        except (Unavailable, DeadlineExceeded):
            serving = False
        if not serving:
            raise Unavailable(
                "the server ends and has aborted the prompt", code="UNAVAILABLE", retryable=True
            )

    def stream(
        self,
        token_ids: t.TokenIds,
        *,
        timeout: float | None = None,
        retry_for: float | None = None,
        **options: Unpack[t.GenerateOptions],
    ) -> Stream[t.Delta]:
        """Like `generate`, but yields tokens as they are generated, of all n samples interleaved.

        Use it in an `async with` statement, or let it go out of scope: a stream left early is
        cancelled on the server. A slow reader gets several tokens merged into one delta.

        A failure before the first delta is retried; a later one is raised, since the tokens of
        another run would not continue those that were read.
        """
        request = t.GenerateRequest(token_ids, **options)
        message = self._named(_wire.generate_request(request, stream=True))
        attempts = self._attempts(timeout, retry_for)
        images = CallImages(self._images, request.images or ())
        return self._stream(message, lambda answer: _wire.delta(answer, request), attempts, images)

    def _stream(
        self,
        message: Any,
        convert: Callable[[Any], T],
        attempts: Attempts | None = None,
        images: CallImages | None = None,
    ) -> Stream[T]:
        def start(left: float | None) -> Any:
            # A stream may be read late: no other call waits for it, nor does it wait.
            filled = message if images is None else images.message(message)
            return self._start(self._inference.Generate, filled, left)

        attempts = attempts or self._attempts(None, None)
        return Stream(start, convert, attempts, self._calls, images)

    @overload
    async def generate_many(
        self,
        requests: Iterable[t.TokenIds | t.GenerateRequest],
        *,
        return_errors: Literal[False] = ...,
        **options: Unpack[t.ManyOptions],
    ) -> list[list[t.Sample]]: ...

    @overload
    async def generate_many(
        self,
        requests: Iterable[t.TokenIds | t.GenerateRequest],
        *,
        return_errors: Literal[True],
        **options: Unpack[t.ManyOptions],
    ) -> list[list[t.Sample] | DoradError]: ...

    async def generate_many(
        self,
        requests: Iterable[t.TokenIds | t.GenerateRequest],
        *,
        concurrency: int = 512,
        return_errors: bool = False,
        progress: Callable[[int, int], None] | None = None,
        answers: Answers | None = None,
        timeout: float | None = None,
        retry_for: float | None = None,
        **options: Unpack[t.GenerateOptions],
    ) -> Any:
        """Generates for many prompts, at most `concurrency` at once; results in order.

        A prompt is sent again while the server is full, paused or away, until its timeout has
        passed. So any number of prompts may be given, and the server may restart meanwhile.

        Args:
          requests: prompts; bare token ids take `options`, a `GenerateRequest` has its own.
          return_errors: put a prompt's error into the result instead of cancelling the rest.
          progress: called as progress(done, total), one call at a time, on the event loop.
          answers: those of earlier calls, for prompts that come again with their seed: they become
            the prompts' drafts, and the new ones take their place.
          timeout: seconds for each prompt, all its attempts included.
          retry_for: seconds to go on after a prompt's failure; None: the client's `retry_for`, or
            else until `timeout`.

        Returns:
          For each prompt its list of samples (or, with return_errors, a DoradError).

        Raises:
          DoradError: the first prompt's error. Its `results` has what had finished: a list as the
            returned one, with None for the prompts that were cancelled.
          ValueError: with `answers`, a prompt has neither a seed nor temperature 0.
        """
        return await run_calls(
            _wire.as_requests(requests, options),
            lambda request, calls: self._generate(
                request, self._insistent(timeout, retry_for), calls, complete=True
            ),
            self._calls,
            concurrency=concurrency,
            return_errors=return_errors,
            progress=progress,
            answers=answers,
        )

    def _insistent(self, timeout: float | None, retry_for: float | None) -> Attempts:
        """Attempts until the timeout, unless the caller or the client sets another time."""
        patience = self._patience(retry_for)
        return Attempts(self._budget(timeout), math.inf if patience is None else patience)

    async def score(
        self,
        sequences: Iterable[t.TokenIds],
        adapters: str | Sequence[str | None] | None = None,
        *,
        top_k: int | None = None,
        chosen_token_ids: t.TokenIds | None = None,
        temperature: float | None = None,
        images: Sequence[Sequence[t.Image] | None] | None = None,
        priority: int | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
        retry_for: float | None = None,
    ) -> t.ScoreResult:
        """Log-probabilities of given sequences under several adapters at once.

        Args:
          sequences: token ids, each at least one token.
          adapters: "name" or "name@version", or several of them and None (the base model); default:
            the base model alone.
          top_k: also the k most likely tokens of each position.
          chosen_token_ids: also the log-probabilities of these tokens at each position.
          temperature: divides the logits first; default 1.0.
          images: of each sequence, None where it has none: see `dorad.images`.

        Returns:
          `result[sequence][adapter]`: float32 [len(tokens)], NaN at position 0.
        """
        message = _wire.score_request(
            sequences, adapters, top_k, chosen_token_ids, temperature, priority, request_id, images
        )
        carried = CallImages(self._images, [i for some in images or () for i in some or ()])
        attempts = self._attempts(timeout, retry_for)

        async def attempt(message: Any) -> Any:
            return await self._call(self._inference.Score, message, attempts.budget.left)

        async def run() -> Any:
            return await self._with_images(carried, message, attempts, attempt)

        answer = await self._repeat(attempts, run, self._calls)
        return _wire.score_result(
            answer,
            [len(sequence.token_ids) // 4 for sequence in message.sequences],
            top_k=top_k or 0,
            chosen=None if chosen_token_ids is None else len(chosen_token_ids),
        )

    async def abort(
        self,
        request_ids: str | Iterable[str] | None = None,
        *,
        adapter: str | None = None,
        all: bool = False,
        allow_missing: bool = False,
        timeout: float | None = None,
        retry_for: float | None = None,
    ) -> int:
        """Ends requests by id, by adapter ("name" or "name@version"), or all; returns how many.

        Their callers get the tokens so far with FinishReason.ABORTED.

        Raises:
          NotFound: the server does not have the adapter, and not `allow_missing`.
        """
        message = _wire.abort_request(request_ids, adapter, all, allow_missing)
        answer = await self._ask(self._inference.Abort, message, timeout, retry_for)
        return int(answer.aborted)
