"""The asyncio client. Arguments, results and errors: dorad._client, the synchronous one."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar, Unpack, overload

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dorad import _wire, _yielding
from dorad import types as t
from dorad._access import Access
from dorad._aio_errors import as_dorad_errors, closed
from dorad._aio_many import run_many
from dorad._aio_stream import Stream, is_set_within
from dorad._channel import DEFAULT_TARGET, channel_options, deadline
from dorad._handover import MemoryPublish, SharedTensors
from dorad._many import as_requests
from dorad._publish import Progress, Upload, server_path
from dorad._retry import Attempts, Throttle, UploadAttempts
from dorad._stubs import (
    adapters_pb2,
    adapters_pb2_grpc,
    control_pb2,
    control_pb2_grpc,
    inference_pb2_grpc,
)
from dorad.errors import DoradError, NotFound, Unavailable

T = TypeVar("T")


class Client:
    """A connection to a dorad server, for one event loop: make it inside a coroutine.

    Arguments are those of `dorad.Client`.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        admin_target: str | None = None,
        timeout: float | None = 600.0,
        retries: bool = True,
        keepalive: float = 60.0,
        token: str | None = None,
        ca_file: str | os.PathLike[str] | None = None,
        cert_file: str | os.PathLike[str] | None = None,
        key_file: str | os.PathLike[str] | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Sequence[tuple[str, str]] = (),
        options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        asyncio.get_running_loop()  # The channel binds to it: fail here rather than hang later.
        self.target = target
        self._timeout = timeout
        self._throttle = Throttle() if retries else None
        self._closed = asyncio.Event()
        self._uploads: set[Any] = set()  # Calls over connections of their own.
        access = Access.of(token, ca_file, cert_file, key_file, credentials)
        self._metadata = (*metadata, *access.metadata)
        settings = channel_options(keepalive, options)
        # Both are looked at before either is made.
        for address in (target, admin_target or target):
            access.channel_credentials(address)

        def connect_sync() -> grpc.Channel:
            return access.channel(admin_target or target, settings)

        self._connect_sync = connect_sync
        self._channel = access.aio_channel(target, settings)
        self._admin = (
            self._channel if admin_target is None else access.aio_channel(admin_target, settings)
        )
        self._inference: Any = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._adapters: Any = adapters_pb2_grpc.AdapterServiceStub(self._admin)
        self._control: Any = control_pb2_grpc.ControlServiceStub(self._admin)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    def with_metadata(self, metadata: Sequence[tuple[str, str]]) -> Client:
        """A client over the same connection, whose calls carry `metadata` in place of this one's.

        For a proxy that passes on what its callers sent. Close the original only.
        """
        other = copy.copy(self)
        other._metadata = tuple(metadata)
        return other

    async def close(self) -> None:
        """Closes the connection; running calls raise Cancelled. Idempotent."""
        self._closed.set()
        for call in self._uploads:
            call.cancel()
        await self._channel.close()
        await self._admin.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def _start(self, method: Any, request: Any, timeout: float | None, *, about: Any = None) -> Any:
        """`about` is a message that names the call's adapter, if `request` does not."""
        if self._closed.is_set():
            raise closed()
        return method(
            request,
            timeout=deadline(timeout, self._timeout),
            metadata=self._metadata + _wire.routing(request if about is None else about),
        )

    async def _call(
        self, method: Any, request: Any, timeout: float | None = None, *, about: Any = None
    ) -> Any:
        with as_dorad_errors():
            return await self._start(method, request, timeout, about=about)

    def _attempts(self, timeout: float | None) -> Attempts:
        return Attempts(deadline(timeout, self._timeout), self._throttle)

    async def _ask(self, method: Any, request: Any, timeout: float | None = None) -> Any:
        """As _call, for unary calls that can be repeated without a second effect."""
        attempts = self._attempts(timeout)
        return await self._repeat(attempts, lambda: self._call(method, request, attempts.left))

    async def _repeat(self, attempts: Attempts, run: Callable[[], Awaitable[T]]) -> T:
        """Runs until an attempt succeeds or none is left, or the client is closed."""
        while True:
            try:
                result = await run()
            except DoradError as error:
                delay = attempts.delay(error)
                if delay is None or await is_set_within(self._closed, delay):
                    raise
            else:
                attempts.answered()
                return result

    # --- Generation -------------------------------------------------------------------------------

    async def generate(
        self,
        token_ids: t.TokenIds,
        *,
        timeout: float | None = None,
        **options: Unpack[t.GenerateOptions],
    ) -> list[t.Sample]:
        """Samples continuations of a prompt and waits for all of them."""
        request = t.GenerateRequest(token_ids, **options)
        return await self._generate(request, self._attempts(timeout))

    async def _generate(self, request: t.GenerateRequest, attempts: Attempts) -> list[t.Sample]:
        message = _wire.generate_request(request, stream=False)
        return await self._repeat(attempts, lambda: self._generate_once(request, message, attempts))

    async def _generate_once(
        self, request: t.GenerateRequest, message: Any, attempts: Attempts
    ) -> list[t.Sample]:
        call = self._start(self._inference.Generate, message, attempts.left)
        samples = _wire.Samples(request)
        try:
            with as_dorad_errors():
                while (answer := await call.read()) is not grpc.aio.EOF:
                    attempts.answered()
                    samples.add(answer)
        finally:
            call.cancel()  # A no-op after the end; otherwise (task cancelled) it frees the slot.
        return samples.finish()

    def stream(
        self,
        token_ids: t.TokenIds,
        *,
        timeout: float | None = None,
        **options: Unpack[t.GenerateOptions],
    ) -> Stream[t.Delta]:
        """Like `generate`, but yields tokens as they come. Not awaited; iterate the result."""
        request = t.GenerateRequest(token_ids, **options)
        message = _wire.generate_request(request, stream=True)
        return self._stream(message, lambda answer: _wire.delta(answer, request), timeout)

    def _stream(
        self, message: Any, convert: Callable[[Any], T], timeout: float | None = None
    ) -> Stream[T]:
        return Stream(
            lambda left: self._start(self._inference.Generate, message, left),
            convert,
            self._attempts(timeout),
            self._closed,
        )

    @overload
    async def generate_many(
        self,
        requests: Iterable[t.TokenIds | t.GenerateRequest],
        *,
        concurrency: int = ...,
        return_errors: Literal[False] = ...,
        progress: Callable[[int, int], None] | None = ...,
        timeout: float | None = ...,
        **options: Unpack[t.GenerateOptions],
    ) -> list[list[t.Sample]]: ...

    @overload
    async def generate_many(
        self,
        requests: Iterable[t.TokenIds | t.GenerateRequest],
        *,
        concurrency: int = ...,
        return_errors: Literal[True],
        progress: Callable[[int, int], None] | None = ...,
        timeout: float | None = ...,
        **options: Unpack[t.GenerateOptions],
    ) -> list[list[t.Sample] | DoradError]: ...

    async def generate_many(
        self,
        requests: Iterable[t.TokenIds | t.GenerateRequest],
        *,
        concurrency: int = 512,
        return_errors: bool = False,
        progress: Callable[[int, int], None] | None = None,
        timeout: float | None = None,
        **options: Unpack[t.GenerateOptions],
    ) -> Any:
        """Generates for many prompts, at most `concurrency` at once; results in order."""
        return await run_many(
            as_requests(requests, options),
            lambda request: self._insist(request, timeout),
            concurrency=concurrency,
            return_errors=return_errors,
            progress=progress,
        )

    async def _insist(self, request: t.GenerateRequest, timeout: float | None) -> list[t.Sample]:
        """Generates, waiting for room while the server's queue is full."""
        budget = deadline(timeout, self._timeout)
        return await self._generate(request, Attempts(budget, self._throttle, insist=True))

    # --- Scoring ----------------------------------------------------------------------------------

    async def score(
        self,
        sequences: Iterable[t.TokenIds],
        adapters: str | Sequence[str | None] | None = None,
        *,
        top_k: int | None = None,
        chosen_token_ids: t.TokenIds | None = None,
        temperature: float | None = None,
        priority: int | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> t.ScoreResult:
        """Log-probabilities of given sequences under several adapters at once."""
        message = _wire.score_request(
            sequences, adapters, top_k, chosen_token_ids, temperature, priority, request_id
        )
        answer = await self._ask(self._inference.Score, message, timeout)
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
        timeout: float | None = None,
    ) -> int:
        """Ends requests by id, by adapter, or all; returns how many."""
        message = _wire.abort_request(request_ids, adapter, all)
        return int((await self._ask(self._inference.Abort, message, timeout)).aborted)

    # --- Adapters ---------------------------------------------------------------------------------

    async def publish(
        self,
        name: str,
        *,
        path: str | os.PathLike[str] | None = None,
        tensors: Mapping[str, Any] | None = None,
        model: Any = None,
        model_adapter: str | None = None,
        config: Any = None,
        activate: bool = True,
        version: int | None = None,
        server_side: bool = False,
        expected_generation: int | None = None,
        durable: bool = False,
        tags: Mapping[str, str] | None = None,
        keep_last: int | None = None,
        pinned: bool = False,
        progress: Progress | None = None,
        timeout: float | None = None,
    ) -> t.AdapterVersion:
        """Publishes a new version of an adapter and returns when it is ready.

        `progress` is called from another thread.
        """
        if server_side:
            if path is None or any(x is not None for x in (tensors, model, model_adapter, config)):
                raise ValueError("server_side takes path, and neither tensors, model nor config")
            message = adapters_pb2.PublishFromPathRequest(
                name=name,
                version=version,
                path=server_path(path),
                activate=activate,
                expected_generation=expected_generation,
                durable=durable,
                tags=tags,
                keep_last=keep_last,
                pinned=pinned,
            )
            answer = await self._call(self._adapters.PublishFromPath, message, timeout)
            return _wire.adapter_version(answer.adapter, answer.generation)
        upload = Upload(
            name,
            path=path,
            tensors=tensors,
            model=model,
            model_adapter=model_adapter,
            config=config,
            activate=activate,
            version=version,
            expected_generation=expected_generation,
            durable=durable,
            tags=tags,
            keep_last=keep_last,
            pinned=pinned,
            progress=progress,
        )
        answer = await self._upload(upload, timeout)
        return _wire.adapter_version(answer.adapter, answer.generation)

    async def _upload(self, upload: Upload, timeout: float | None) -> Any:
        """Sends the upload over a connection of its own, with gRPC's synchronous machinery.

        grpc.aio can lose the server's status when a call ends while the client still writes (it
        reports INTERNAL instead, grpc issue 36066), which would hide why an adapter was refused.
        Disk reads and hashing stay off the event loop this way as well.
        """
        attempts = UploadAttempts(
            deadline(timeout, self._timeout), self._throttle is not None, size=upload.size
        )
        with self._connect_sync() as channel:
            stub: Any = adapters_pb2_grpc.AdapterServiceStub(channel)
            while True:
                try:
                    if attempts.again:
                        received = await self._received(upload, attempts.left)
                        attempts.go_on_at(received, upload.sent)
                    return await self._send(stub, upload, attempts)
                except DoradError as error:
                    if upload.failure is not None:
                        raise upload.failure from None
                    delay = attempts.delay(error)
                    if delay is None or await is_set_within(self._closed, delay):
                        raise

    async def _send(self, stub: Any, upload: Upload, attempts: UploadAttempts) -> Any:
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        if self._closed.is_set():
            raise closed()
        call = stub.Publish.future(
            upload.messages(attempts.offset),
            timeout=deadline(attempts.left, None),
            metadata=self._metadata + _wire.routing(upload.begin),
        )

        def wake(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # The loop has been closed meanwhile.
                loop.call_soon_threadsafe(done.set)

        call.add_done_callback(wake)
        self._uploads.add(call)
        try:
            await done.wait()
            with as_dorad_errors():
                return call.result()
        except grpc.FutureCancelledError:
            raise closed() from None
        finally:
            self._uploads.discard(call)
            call.cancel()

    async def _received(self, upload: Upload, timeout: float) -> int:
        """Bytes of an upload that the server has."""
        try:
            message = adapters_pb2.GetUploadRequest(upload_id=upload.id)
            answer = await self._call(
                self._adapters.GetUpload, message, timeout, about=upload.begin
            )
            return int(answer.received_bytes)
        except NotFound:
            return 0

    async def publish_from_memory(
        self,
        name: str,
        *,
        handover: str | os.PathLike[str] | SharedTensors,
        tensors: Mapping[str, Any] | None = None,
        model: Any = None,
        model_adapter: str | None = None,
        config: Any = None,
        activate: bool = True,
        version: int | None = None,
        expected_generation: int | None = None,
        durable: bool = False,
        tags: Mapping[str, str] | None = None,
        keep_last: int | None = None,
        pinned: bool = False,
        check: bool = False,
        expected_digest: str = "",
        timeout: float | None = None,
    ) -> t.AdapterVersion:
        """Publishes a new version that the server reads out of this host's memory."""
        publish = MemoryPublish(
            name,
            handover=handover,
            tensors=tensors,
            model=model,
            model_adapter=model_adapter,
            config=config,
            activate=activate,
            version=version,
            expected_generation=expected_generation,
            durable=durable,
            tags=tags,
            keep_last=keep_last,
            pinned=pinned,
            check=check,
            expected_digest=expected_digest,
            timeout=deadline(timeout, self._timeout),
        )
        with contextlib.ExitStack() as stack:
            message = await self._enter(publish)
            stack.push(publish)
            answer = await self._call(self._adapters.PublishFromMemory, message, publish.left)
        return _wire.adapter_version(answer.adapter, answer.generation)

    @staticmethod
    async def _enter(publish: MemoryPublish) -> Any:
        """Waits for a buffer and copies, off the event loop."""
        entered = asyncio.ensure_future(asyncio.to_thread(publish.__enter__))
        try:
            return await asyncio.shield(entered)
        except asyncio.CancelledError:

            def leave(done: asyncio.Future[Any]) -> None:
                if done.exception() is None:
                    publish.__exit__(None, None, None)

            entered.add_done_callback(leave)
            raise

    async def activate(
        self,
        name: str,
        version: int | None = None,
        *,
        expected_generation: int | None = None,
        timeout: float | None = None,
    ) -> t.Activation:
        """Makes a version the active one: activate("a@2") or activate("a", 2)."""
        name, number = _wire.split_ref(name, version)
        message = adapters_pb2.ActivateRequest(
            name=name, version=number, expected_generation=expected_generation
        )
        answer = await self._call(self._adapters.Activate, message, timeout)
        return t.Activation(
            _wire.adapter_version(answer.adapter, answer.generation),
            answer.previous_version,
            answer.generation,
        )

    async def adapters(
        self, name: str | None = None, *, timeout: float | None = None
    ) -> list[t.AdapterVersion]:
        """All versions (of one name), ordered by name and version; every page is fetched."""
        found: list[t.AdapterVersion] = []
        token = ""
        while True:
            message = adapters_pb2.ListRequest(name=name or "", page_size=1000, page_token=token)
            answer = await self._ask(self._adapters.List, message, timeout)
            found += [_wire.adapter_version(a, answer.generation) for a in answer.adapters]
            token = answer.next_page_token
            if not token:
                return found

    async def adapter(self, ref: str, *, timeout: float | None = None) -> t.AdapterVersion:
        """One version: "name" (the active one) or "name@version". Raises NotFound."""
        message = adapters_pb2.GetRequest(adapter=ref)
        answer = await self._ask(self._adapters.Get, message, timeout)
        return _wire.adapter_version(answer.adapter, answer.generation)

    async def retire(
        self,
        name: str,
        version: int | None = None,
        *,
        force: bool = False,
        timeout: float | None = None,
    ) -> t.AdapterVersion:
        """Unpublishes a version now; with `force` the requests that hold it are aborted."""
        name, number = _wire.split_ref(name, version)
        message = adapters_pb2.RetireRequest(name=name, version=number, force=force)
        answer = await self._call(self._adapters.Retire, message, timeout)
        return _wire.adapter_version(answer.adapter, answer.generation)

    def watch(
        self, from_generation: int | None = None, *, timeout: float | None = float("inf")
    ) -> Stream[t.WatchEvent]:
        """Registry events with a greater generation, in order; default: from now on."""
        message = adapters_pb2.WatchRequest(from_generation=from_generation)
        # As in the synchronous client: one attempt.
        once = Attempts(deadline(timeout, self._timeout), None)
        return Stream(
            lambda left: self._start(self._adapters.Watch, message, left),
            _wire.watch_event,
            once,
            self._closed,
        )

    # --- Operation --------------------------------------------------------------------------------

    async def info(self, *, timeout: float | None = None) -> t.ServerInfo:
        """What the server is, holds and does now."""
        answer = await self._ask(self._control.GetInfo, control_pb2.GetInfoRequest(), timeout)
        return _wire.server_info(answer)

    async def pause(
        self,
        mode: Literal["keep", "wait", "abort"] = "keep",
        *,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> int:
        """Stops the engine from starting steps, or with `adapter` ("name" or "name@version") the
        requests that hold it; returns how many requests were frozen or ended.

        "keep" freezes requests where they are, "wait" lets admitted ones finish first and refuses
        new ones, "abort" ends them now. Publishing and activating stay possible.
        """
        message = control_pb2.PauseRequest(mode=_wire.pause_mode(mode), adapter=adapter or "")
        return int((await self._ask(self._control.Pause, message, timeout)).affected)

    async def resume(self, adapter: str | None = None, *, timeout: float | None = None) -> None:
        """Undoes the `pause` of an adapter, or all pauses."""
        message = control_pb2.ResumeRequest(adapter=adapter or "")
        await self._ask(self._control.Resume, message, timeout)

    async def sleep(
        self,
        *tags: Literal["weights", "kv", "adapters"],
        keep_kv: bool = False,
        refuse_requests: bool = False,
        timeout: float | None = None,
    ) -> dict[str, int]:
        """Gives memory back to whoever else uses the device, until `wake`; no tags mean all.

        Returns the bytes that were given back, by tag; weights that are lent to a trainer stay.
        Requests wait meanwhile, or new ones are refused. Running ones go on afterwards with the
        same results: from a copy of the KV cache in host memory with `keep_kv`, or else
        computed again.
        """
        message = control_pb2.SleepRequest(
            tags=tags, keep_kv=keep_kv, refuse_requests=refuse_requests
        )
        answer = await self._call(self._control.Sleep, message, timeout)
        return {tag: int(count) for tag, count in answer.freed_bytes.items()}

    async def wake(
        self, *tags: Literal["weights", "kv", "adapters"], timeout: float | None = None
    ) -> None:
        """Takes the memory again that `sleep` gave back; no tags mean all.

        Raises ResourceExhausted when there is too little: what is left sleeps on.
        """
        await self._call(self._control.Wake, control_pb2.WakeRequest(tags=tags), timeout)

    async def yield_gpu(
        self,
        share: float,
        *,
        time_to_live: float,
        yield_id: str,
        timeout: float | None = None,
    ) -> float:
        """Leaves the device to others: steps take at most `share` (0.01 to 1) of the time.

        Until `end_yield`, or for `time_to_live` seconds (at most a day); another call with the same
        `yield_id` renews and changes it. Of several yields, and of the server's own
        engine.gpu_share, the smallest share counts. Results do not depend on it. Returns the share
        in effect.
        """
        message = _yielding.yield_request(share, time_to_live, yield_id)
        return float((await self._ask(self._control.Yield, message, timeout)).gpu_share)

    async def end_yield(self, yield_id: str, *, timeout: float | None = None) -> bool:
        """Ends a yield. False: it had ended by itself, or there was none."""
        message = control_pb2.EndYieldRequest(yield_id=yield_id)
        return bool((await self._ask(self._control.EndYield, message, timeout)).ended)

    def yielding(
        self, share: float, *, time_to_live: float = _yielding.DEFAULT_TIME_TO_LIVE
    ) -> contextlib.AbstractAsyncContextManager[float]:
        """A block beside which the server's steps take at most `share` of the time.

            async with client.yielding(0.3):
                await asyncio.to_thread(train)

        The yield is renewed meanwhile and ends with the block; should this process die, after
        `time_to_live` seconds. Gives the share in effect.
        """
        interval = _yielding.renewal_interval(time_to_live)
        yield_id = _yielding.new_id()

        async def renew() -> float:
            return await self.yield_gpu(
                share, time_to_live=time_to_live, yield_id=yield_id, timeout=interval
            )

        return _yielding.renewed_async(
            renew, lambda: self.end_yield(yield_id, timeout=interval), interval
        )

    async def health(self, service: str = "", *, timeout: float | None = 5.0) -> str:
        """The server (or one service by full name): "serving", "not_serving" or "unknown"."""
        message = health_pb2.HealthCheckRequest(service=service)
        answer = await self._call(self._health.Check, message, timeout)
        name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        return str(name).lower()

    async def wait_ready(self, timeout: float = 60.0) -> None:
        """Returns when the server is serving. Raises Unavailable after `timeout` seconds."""
        end = time.monotonic() + timeout
        while True:
            try:
                left = max(0.05, min(5.0, end - time.monotonic()))
                state = await self.health(timeout=left)
                if state == "serving":
                    return
            except DoradError as error:
                state = error.message
            if time.monotonic() >= end:
                raise Unavailable(
                    f"{self.target} is not serving after {timeout:g} s: {state}", code="UNAVAILABLE"
                )
            await asyncio.sleep(0.05)
