"""The synchronous client."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Self, TypeVar, Unpack, overload

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dorad import _wire, _yielding
from dorad import types as t
from dorad._access import Access
from dorad._channel import DEFAULT_TARGET, channel_options, deadline
from dorad._handover import MemoryPublish, SharedTensors
from dorad._many import RunningCalls, as_requests, run_many
from dorad._publish import Progress, Upload, server_path
from dorad._retry import Attempts, Throttle, UploadAttempts
from dorad._stream import Stream
from dorad._stubs import (
    adapters_pb2,
    adapters_pb2_grpc,
    control_pb2,
    control_pb2_grpc,
    inference_pb2_grpc,
)
from dorad.errors import DoradError, NotFound, Unavailable, from_rpc_error

T = TypeVar("T")


class Client:
    """A connection to a dorad server. Thread-safe; make one and share it.

    Not usable across fork(): make the client in the child.

    Args:
      target: "host:port", "[v6]:port" or "unix:PATH".
      admin_target: where the adapter and control services are, if the server has an admin listener.
      timeout: seconds a call may take unless it says otherwise; None or math.inf: no limit.
      retries: send calls that can be repeated again when the server cannot be reached or is full
        and says when to come back: up to 5 attempts within the timeout, never after an answer's
        first message; and let uploads go on after a break.
      keepalive: seconds between pings while calls run, at least 30; math.inf: none.
      token: shown with every call (DORAD_TOKEN). Never sent in plain text to another host,
        nor to a proxy of the environment (http_proxy), which only TLS connections use.
      ca_file: PEM file of the authorities whose servers are trusted (DORAD_CA_FILE). With it, or
        with cert_file, TCP connections use TLS; socket files never do.
      cert_file, key_file: PEM files of the client's own certificate and its key, for servers that
        ask for one (DORAD_CERT_FILE, DORAD_KEY_FILE).
      credentials: other credentials for TLS instead of the three files.
      metadata: sent with every call, for example an authorization header for a proxy.
      options: further gRPC channel options; they win over ours, except that a connection in plain
        text never goes through a proxy.

    Every method raises a subclass of `DoradError` when the call fails, and ValueError or TypeError
    for arguments that cannot be sent.
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
        self.target = target
        self._timeout = timeout
        self._throttle = Throttle() if retries else None
        self._closed = threading.Event()
        access = Access.of(token, ca_file, cert_file, key_file, credentials)
        self._metadata = (*metadata, *access.metadata)
        settings = channel_options(keepalive, options)
        # Both are looked at before either is made.
        for address in (target, admin_target or target):
            access.channel_credentials(address)
        self._channel = access.channel(target, settings)
        self._admin = (
            self._channel if admin_target is None else access.channel(admin_target, settings)
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

    def close(self) -> None:
        """Closes the connection; running calls are cancelled. Idempotent."""
        self._closed.set()
        self._channel.close()
        self._admin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _call(
        self, method: Any, request: Any, timeout: float | None = None, *, about: Any = None
    ) -> Any:
        """Starts a call (unary: runs it) with this client's deadline and metadata.

        `about` is a message that names the call's adapter, if `request` does not.
        """
        try:
            return method(
                request,
                timeout=deadline(timeout, self._timeout),
                metadata=self._metadata + _wire.routing(request if about is None else about),
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    def _attempts(self, timeout: float | None) -> Attempts:
        return Attempts(deadline(timeout, self._timeout), self._throttle)

    def _ask(self, method: Any, request: Any, timeout: float | None = None) -> Any:
        """As _call, for unary calls that can be repeated without a second effect."""
        attempts = self._attempts(timeout)
        return self._repeat(attempts, lambda: self._call(method, request, attempts.left))

    def _repeat(
        self, attempts: Attempts, run: Callable[[], T], closed: threading.Event | None = None
    ) -> T:
        """Runs until an attempt succeeds, none is left, or the client (or `closed`) is closed."""
        while True:
            try:
                result = run()
            except DoradError as error:
                delay = attempts.delay(error)
                if delay is None or (closed or self._closed).wait(delay) or self._closed.is_set():
                    raise
            else:
                attempts.answered()
                return result

    # --- Generation -------------------------------------------------------------------------------

    def generate(
        self,
        token_ids: t.TokenIds,
        *,
        timeout: float | None = None,
        **options: Unpack[t.GenerateOptions],
    ) -> list[t.Sample]:
        """Samples continuations of a prompt and waits for all of them.

        Args:
          token_ids: the prompt, at least one token.
          timeout: seconds; None: the client's default, math.inf: none.
          **options: see `GenerateOptions` (adapter, n, max_tokens, temperature, seed, logprobs, …).

        Returns:
          n samples in order of their index; token_ids int32 [tokens], logprobs float32 [tokens].

        Raises:
          InvalidArgument: with every problem in `violations`.
          NotFound: no such adapter or version.
          Overloaded: the server's queue is full.
        """
        request = t.GenerateRequest(token_ids, **options)
        attempts = self._attempts(timeout)

        def run() -> list[t.Sample]:
            call = self._start(request, stream=False, timeout=attempts.left)
            return self._collect(call, request, attempts)

        return self._repeat(attempts, run)

    def stream(
        self,
        token_ids: t.TokenIds,
        *,
        timeout: float | None = None,
        **options: Unpack[t.GenerateOptions],
    ) -> Stream[t.Delta]:
        """Like `generate`, but yields tokens as they come, of all n samples interleaved.

        Use it in a `with` statement, or let it go out of scope: a stream left early is cancelled
        on the server. Tokens a slow reader has not taken yet arrive merged into one delta.
        """
        request = t.GenerateRequest(token_ids, **options)
        return Stream(
            lambda left: self._start(request, stream=True, timeout=left),
            lambda message: _wire.delta(message, request),
            self._attempts(timeout),
            self._closed,
        )

    def _start(self, request: t.GenerateRequest, *, stream: bool, timeout: float | None) -> Any:
        message = _wire.generate_request(request, stream=stream)
        return self._call(self._inference.Generate, message, timeout)

    @staticmethod
    def _collect(call: Any, request: t.GenerateRequest, attempts: Attempts) -> list[t.Sample]:
        samples = _wire.Samples(request)
        try:
            for message in call:
                attempts.answered()
                samples.add(message)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()  # A no-op after the end; otherwise (KeyboardInterrupt) it frees the slot.
        return samples.finish()

    @overload
    def generate_many(
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
    def generate_many(
        self,
        requests: Iterable[t.TokenIds | t.GenerateRequest],
        *,
        concurrency: int = ...,
        return_errors: Literal[True],
        progress: Callable[[int, int], None] | None = ...,
        timeout: float | None = ...,
        **options: Unpack[t.GenerateOptions],
    ) -> list[list[t.Sample] | DoradError]: ...

    def generate_many(
        self,
        requests: Iterable[t.TokenIds | t.GenerateRequest],
        *,
        concurrency: int = 128,
        return_errors: bool = False,
        progress: Callable[[int, int], None] | None = None,
        timeout: float | None = None,
        **options: Unpack[t.GenerateOptions],
    ) -> Any:
        """Generates for many prompts, at most `concurrency` at once; results in order.

        A prompt the server refuses because its queue is full is sent again after the server's
        `retry_after` until its timeout has passed, so any number of prompts may be given.

        Args:
          requests: prompts; bare token ids take `options`, a `GenerateRequest` has its own.
          return_errors: put a prompt's error into the result instead of cancelling the rest.
          progress: called as progress(done, total) from worker threads, one call at a time.
          timeout: seconds for each prompt, waiting for the queue included.

        Returns:
          For each prompt its list of samples (or, with return_errors, a DoradError).
        """
        budget = deadline(timeout, self._timeout)
        calls = RunningCalls()

        def generate(request: t.GenerateRequest) -> list[t.Sample]:
            attempts = Attempts(budget, self._throttle, insist=True)

            def once() -> list[t.Sample]:
                call = self._start(request, stream=False, timeout=attempts.left)
                with calls.running(call):
                    return self._collect(call, request, attempts)

            return self._repeat(attempts, once, calls.stopped)

        return run_many(
            as_requests(requests, options),
            generate,
            calls.stop,
            concurrency=concurrency,
            return_errors=return_errors,
            progress=progress,
        )

    # --- Scoring ----------------------------------------------------------------------------------

    def score(
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
        """Log-probabilities of given sequences under several adapters at once.

        Args:
          sequences: token ids, each at least one token.
          adapters: "name" or "name@version", or several of them and None (the base model); default:
            the base model alone.
          top_k: also the k most likely tokens of each position.
          chosen_token_ids: also the log-probabilities of these tokens at each position.
          temperature: divides the logits first; default 1.0.

        Returns:
          `result[sequence][adapter]`: float32 [len(tokens)], NaN at position 0.
        """
        message = _wire.score_request(
            sequences, adapters, top_k, chosen_token_ids, temperature, priority, request_id
        )
        answer = self._ask(self._inference.Score, message, timeout)
        return _wire.score_result(
            answer,
            [len(sequence.token_ids) // 4 for sequence in message.sequences],
            top_k=top_k or 0,
            chosen=None if chosen_token_ids is None else len(chosen_token_ids),
        )

    def abort(
        self,
        request_ids: str | Iterable[str] | None = None,
        *,
        adapter: str | None = None,
        all: bool = False,
        timeout: float | None = None,
    ) -> int:
        """Ends requests by id, by adapter ("name" or "name@version"), or all; returns how many.

        Their callers get the tokens so far with FinishReason.ABORTED.
        """
        message = _wire.abort_request(request_ids, adapter, all)
        return int(self._ask(self._inference.Abort, message, timeout).aborted)

    # --- Adapters ---------------------------------------------------------------------------------

    def publish(
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

        An upload whose connection breaks goes on from what the server has, and is published once,
        also when only the answer was lost.

        Args:
          name: lower-case letters, digits, ".", "_" and "-".
          path: a PEFT folder (adapter_config.json, adapter_model.safetensors), uploaded from here.
          tensors: instead of path: name → torch tensor or numpy array, named as PEFT saves them.
            They must not change until this returns.
          model: instead of path: a peft.PeftModel, which must not be trained until this returns.
          model_adapter: with model: PEFT's name of the adapter to take; default: the active one.
          config: with tensors: adapter_config.json as a mapping, JSON text or PEFT config object.
            With path or model it replaces theirs.
          activate: requests that name just `name` use this version from now on.
          version: must exceed every version the name ever had; default: the next one.
          server_side: path is an absolute one on the server's host, under one of its allowed roots.
          expected_generation: with activate, fail with Conflict unless the registry is there.
          durable: the version survives a restart of the server, which must have a store
            (adapters.store_path).
          tags: free text stored with the version.
          keep_last: afterwards, retire this name's ready versions that are neither active nor among
            its newest so many ready ones; 0: none; default: the server's adapters.keep_last.
          pinned: its weights never make room for those of others (adapters.resident_bytes).
          progress: called as progress(bytes sent, bytes in all), from another thread; it steps
            back when an upload goes on after a break.

        Raises:
          InvalidArgument: the adapter is refused; `violations` lists every problem.
          Conflict: the version number is taken, or the generation has moved.
          Unavailable, Overloaded: among others, the server's store cannot take a durable
            version (reasons STORE_UNAVAILABLE, STORE_FULL); nothing of it is left.
          FileNotFoundError: the local folder or one of its files is missing.
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
            answer = self._call(self._adapters.PublishFromPath, message, timeout)
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
        answer = self._upload(upload, timeout)
        return _wire.adapter_version(answer.adapter, answer.generation)

    def _upload(self, upload: Upload, timeout: float | None) -> Any:
        attempts = UploadAttempts(
            deadline(timeout, self._timeout), self._throttle is not None, size=upload.size
        )
        while True:
            try:
                if attempts.again:
                    received = self._received(upload, attempts.left)
                    attempts.go_on_at(received, upload.sent)
                messages = upload.messages(attempts.offset)
                return self._call(
                    self._adapters.Publish, messages, attempts.left, about=upload.begin
                )
            except DoradError as error:
                if upload.failure is not None:
                    raise upload.failure from None
                delay = attempts.delay(error)
                if delay is None or self._closed.wait(delay):
                    raise

    def _received(self, upload: Upload, timeout: float) -> int:
        """Bytes of an upload that the server has."""
        try:
            message = adapters_pb2.GetUploadRequest(upload_id=upload.id)
            answer = self._call(self._adapters.GetUpload, message, timeout, about=upload.begin)
            return int(answer.received_bytes)
        except NotFound:
            return 0

    def publish_from_memory(
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
        """Publishes a new version that the server reads out of this host's memory.

        The server must run on this host under this process's user, with server.handover_socket.
        Options that `publish` has as well mean the same.

        Args:
          handover: the server's server.handover_socket, or what holds the memory across steps.
          tensors: name → torch tensor or numpy array, named as PEFT saves them, in the host's
            memory or on the server's GPU. They must not change until this returns.
          model: instead of tensors: a peft.PeftModel, which must not be trained until this returns.
          check: hash every tensor here; the server refuses what it reads differently.
          expected_digest: refuse the version unless it has this digest.

        Raises:
          InvalidArgument: the adapter is refused, or its memory was written to too early
            (HANDOVER_DIGEST_MISMATCH; only with check or expected_digest).
          Unavailable: nobody listens on the handover socket.
          PermissionDenied: the server runs under another user.
        """
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
        with publish as message:
            answer = self._call(self._adapters.PublishFromMemory, message, publish.left)
        return _wire.adapter_version(answer.adapter, answer.generation)

    def activate(
        self,
        name: str,
        version: int | None = None,
        *,
        expected_generation: int | None = None,
        timeout: float | None = None,
    ) -> t.Activation:
        """Makes a version the active one: activate("a@2") or activate("a", 2).

        Raises Conflict when `expected_generation` is given and the registry has moved on.
        """
        name, number = _wire.split_ref(name, version)
        answer = self._call(
            self._adapters.Activate,
            adapters_pb2.ActivateRequest(
                name=name, version=number, expected_generation=expected_generation
            ),
            timeout,
        )
        return t.Activation(
            _wire.adapter_version(answer.adapter, answer.generation),
            answer.previous_version,
            answer.generation,
        )

    def adapters(
        self, name: str | None = None, *, timeout: float | None = None
    ) -> list[t.AdapterVersion]:
        """All versions (of one name), ordered by name and version; every page is fetched."""
        found: list[t.AdapterVersion] = []
        token = ""
        while True:
            message = adapters_pb2.ListRequest(name=name or "", page_size=1000, page_token=token)
            answer = self._ask(self._adapters.List, message, timeout)
            found += [_wire.adapter_version(a, answer.generation) for a in answer.adapters]
            token = answer.next_page_token
            if not token:
                return found

    def adapter(self, ref: str, *, timeout: float | None = None) -> t.AdapterVersion:
        """One version: "name" (the active one) or "name@version". Raises NotFound."""
        answer = self._ask(self._adapters.Get, adapters_pb2.GetRequest(adapter=ref), timeout)
        return _wire.adapter_version(answer.adapter, answer.generation)

    def retire(
        self,
        name: str,
        version: int | None = None,
        *,
        force: bool = False,
        timeout: float | None = None,
    ) -> t.AdapterVersion:
        """Unpublishes a version now: retire("a@1") or retire("a", 1).

        Its memory is freed when the requests that hold it end; with `force` they are aborted.
        """
        name, number = _wire.split_ref(name, version)
        message = adapters_pb2.RetireRequest(name=name, version=number, force=force)
        answer = self._call(self._adapters.Retire, message, timeout)
        return _wire.adapter_version(answer.adapter, answer.generation)

    def watch(
        self, from_generation: int | None = None, *, timeout: float | None = float("inf")
    ) -> Stream[t.WatchEvent]:
        """Registry events with a greater generation, in order; default: from now on. Never ends.

        Never begins again by itself: after Unavailable, watch from the last event's generation.

        Raises InvalidArgument (OUT_OF_RANGE) when events after `from_generation` are gone: call
        `adapters()` and watch from its generation.
        """
        message = adapters_pb2.WatchRequest(from_generation=from_generation)
        # One attempt: the next one would begin at a later "now", and events between were lost.
        once = Attempts(deadline(timeout, self._timeout), None)
        return Stream(
            lambda left: self._call(self._adapters.Watch, message, left),
            _wire.watch_event,
            once,
            self._closed,
        )

    # --- Operation --------------------------------------------------------------------------------

    def info(self, *, timeout: float | None = None) -> t.ServerInfo:
        """What the server is, holds and does now."""
        answer = self._ask(self._control.GetInfo, control_pb2.GetInfoRequest(), timeout)
        return _wire.server_info(answer)

    def pause(
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
        return int(self._ask(self._control.Pause, message, timeout).affected)

    def resume(self, adapter: str | None = None, *, timeout: float | None = None) -> None:
        """Undoes the `pause` of an adapter, or all pauses."""
        message = control_pb2.ResumeRequest(adapter=adapter or "")
        self._ask(self._control.Resume, message, timeout)

    def sleep(
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
        answer = self._call(self._control.Sleep, message, timeout)
        return {tag: int(count) for tag, count in answer.freed_bytes.items()}

    def wake(
        self, *tags: Literal["weights", "kv", "adapters"], timeout: float | None = None
    ) -> None:
        """Takes the memory again that `sleep` gave back; no tags mean all.

        Raises ResourceExhausted when there is too little: what is left sleeps on.
        """
        self._call(self._control.Wake, control_pb2.WakeRequest(tags=tags), timeout)

    def yield_gpu(
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
        return float(self._ask(self._control.Yield, message, timeout).gpu_share)

    def end_yield(self, yield_id: str, *, timeout: float | None = None) -> bool:
        """Ends a yield. False: it had ended by itself, or there was none."""
        message = control_pb2.EndYieldRequest(yield_id=yield_id)
        return bool(self._ask(self._control.EndYield, message, timeout).ended)

    def yielding(
        self, share: float, *, time_to_live: float = _yielding.DEFAULT_TIME_TO_LIVE
    ) -> AbstractContextManager[float]:
        """A block beside which the server's steps take at most `share` of the time.

            with client.yielding(0.3):
                loss.backward()
                optimizer.step()

        The yield is renewed meanwhile and ends with the block; should this process die, after
        `time_to_live` seconds. Gives the share in effect.
        """
        interval = _yielding.renewal_interval(time_to_live)
        yield_id = _yielding.new_id()

        def renew() -> float:
            return self.yield_gpu(
                share, time_to_live=time_to_live, yield_id=yield_id, timeout=interval
            )

        return _yielding.renewed(
            renew, lambda: self.end_yield(yield_id, timeout=interval), interval
        )

    def health(self, service: str = "", *, timeout: float | None = 5.0) -> str:
        """The server (or one service by full name): "serving", "not_serving" or "unknown"."""
        message = health_pb2.HealthCheckRequest(service=service)
        answer = self._call(self._health.Check, message, timeout)
        name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        return str(name).lower()

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Returns when the server is serving. Raises Unavailable after `timeout` seconds."""
        end = time.monotonic() + timeout
        while True:
            state = "unreachable"
            try:
                state = self.health(timeout=max(0.05, min(5.0, end - time.monotonic())))
                if state == "serving":
                    return
            except DoradError as error:
                state = error.message
            if time.monotonic() >= end:
                raise Unavailable(
                    f"{self.target} is not serving after {timeout:g} s: {state}", code="UNAVAILABLE"
                )
            time.sleep(0.05)
