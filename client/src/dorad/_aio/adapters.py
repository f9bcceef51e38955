"""Publishing and managing adapters."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import grpc

from dorad import _references, _wire
from dorad import types as t
from dorad._aio.connection import Connection
from dorad._aio.stream import Stream
from dorad._arguments import filled
from dorad._asyncio import AsDoradErrors, entered, outcome, upload_channel
from dorad._channel import Budget, closed
from dorad._publish import Progress, Upload, server_path
from dorad._retry import Attempts, UploadAttempts
from dorad._shared_memory_socket import MemoryPublish, SharedTensors
from dorad._stubs import adapters_pb2, adapters_pb2_grpc
from dorad.errors import DoradError, NotFound


class Adapters(Connection):
    """The methods of the adapter service."""

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
        retry_for: float | None = None,
    ) -> t.AdapterVersion:
        """Publishes a new version of an adapter and returns when it is ready.

        A broken upload resumes from the server's last byte, and is published once, even if only the
        answer was lost.

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
          expected_generation: with activate, fail with Conflict unless it is the registry's.
          durable: the version survives a restart of the server, which must have a store
            (adapters.store_path).
          tags: free text stored with the version.
          keep_last: afterwards, retire this name's ready versions that are neither active nor among
            its newest so many ready ones; 0: none; default: the server's adapters.keep_last.
          pinned: its weights are never evicted (adapters.resident_bytes).
          progress: called as progress(bytes sent, bytes in all), from another thread; the first
            value decreases when a broken upload resumes.

        Raises:
          InvalidArgument: the adapter is refused; `violations` lists every problem.
          Conflict: the version number is taken, or the generation has moved.
          Unavailable, Overloaded: among others, the server's store cannot take a durable
            version (reasons STORE_UNAVAILABLE, STORE_FULL); nothing is kept.
          FileNotFoundError: the local folder or one of its files is missing.
        """
        options: dict[str, Any] = {
            "name": name,
            "version": version,
            "activate": activate,
            "expected_generation": expected_generation,
            "durable": durable,
            "tags": tags,
            "keep_last": keep_last,
            "pinned": pinned,
        }
        if server_side:
            if path is None or any(x is not None for x in (tensors, model, model_adapter, config)):
                raise ValueError("server_side takes path, and neither tensors, model nor config")
            message = filled(adapters_pb2.PublishFromPathRequest, path=server_path(path), **options)
            answer = await self._ask(
                self._adapters.PublishFromPath, message, timeout, retry_for, effects=True
            )
        else:
            upload = Upload(
                options,
                path=path,
                tensors=tensors,
                model=model,
                model_adapter=model_adapter,
                config=config,
                progress=progress,
            )
            attempts = UploadAttempts(
                self._budget(timeout), self._patience(retry_for), size=upload.size
            )
            answer = await self._upload(upload, attempts)
        return _wire.adapter_version(answer.adapter, answer.generation)

    async def publish_from_peer(
        self,
        name: str,
        version: int,
        *,
        peer: str,
        upload_id: str,
        config_sha256: str,
        tensors_sha256: str,
        size: int,
        activate: bool = False,
        expected_generation: int | None = None,
        durable: bool = False,
        tags: Mapping[str, str] | None = None,
        keep_last: int | None = None,
        pinned: bool = False,
        timeout: float | None = None,
        retry_for: float | None = None,
    ) -> t.AdapterVersion:
        """Makes the server take a version from another server, and returns when it is ready.

        The peer may still be receiving the version itself. If it fails, call again with the same
        arguments and another peer: the server goes on from the bytes that it has.

        Args:
          name, version: as on the peer. The number need not be above the server's others.
          peer: "host:port" as the server reaches it, within its peers.allowed.
          upload_id: 1 to 128 of [A-Za-z0-9._-], the same for all calls about this version.
          config_sha256, tensors_sha256: hexadecimal, of adapter_config.json and of
            adapter_model.safetensors. The server refuses other bytes.
          size: bytes of adapter_model.safetensors.
          activate, expected_generation, durable, tags, keep_last, pinned: as of `publish`.

        Raises:
          Unavailable: among others with reason PEER_UNAVAILABLE, when the peer fails.
          PermissionDenied: among others with reason PEER_NOT_ALLOWED.
        """
        message = filled(
            adapters_pb2.PublishFromPeerRequest,
            name=name,
            version=version,
            peer=peer,
            upload_id=upload_id,
            adapter_config_sha256=bytes.fromhex(config_sha256),
            safetensors_sha256=bytes.fromhex(tensors_sha256),
            safetensors_size=size,
            activate=activate,
            expected_generation=expected_generation,
            durable=durable,
            tags=tags,
            keep_last=keep_last,
            pinned=pinned,
        )
        answer = await self._ask(
            self._adapters.PublishFromPeer, message, timeout, retry_for, effects=True
        )
        return _wire.adapter_version(answer.adapter, answer.generation)

    async def _upload(self, upload: Upload, attempts: UploadAttempts) -> Any:
        budget = attempts.budget
        with upload_channel(
            self._access, self._admin_target, self._options, self._admin
        ) as channel:
            method = adapters_pb2_grpc.AdapterServiceStub(channel).Publish.future
            while True:
                try:
                    if attempts.again:
                        received = await self._received(upload, budget)
                        attempts.go_on_at(received, upload.sent)
                    messages = upload.messages(attempts.offset)
                    call = self._start(method, messages, budget.left, about=upload.begin)
                    try:
                        with self._calls.running(call), AsDoradErrors():
                            return await outcome(call)
                    except grpc.FutureCancelledError:
                        raise closed() from None
                except DoradError as error:
                    if upload.failure is not None:
                        raise upload.failure from None
                    delay = attempts.delay(error)
                    if delay is None or await self._calls.ended_within(delay):
                        raise

    async def _received(self, upload: Upload, budget: Budget) -> int:
        """Bytes of an upload that the server has."""
        message = adapters_pb2.GetUploadRequest(upload_id=upload.id)
        try:
            answer = await self._call(
                self._adapters.GetUpload, message, budget.left, about=upload.begin
            )
        except NotFound:
            return 0
        return int(answer.received_bytes)

    async def publish_from_memory(
        self,
        name: str,
        *,
        shared_memory: str | os.PathLike[str] | SharedTensors,
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
        retry_for: float | None = None,
    ) -> t.AdapterVersion:
        """Publishes a new version that the server reads from this host's memory.

        The server must run on this host under this process's user, with
        server.shared_memory_socket. Options with the same name as in `publish` have the same
        meaning.

        Args:
          shared_memory: path of the server's server.shared_memory_socket, or an object that holds
            the memory across steps.
          tensors: name → torch tensor or numpy array, named as PEFT saves them, in the host's
            memory or on the server's GPU. They must not change until this returns.
          model: instead of tensors: a peft.PeftModel, which must not be trained until this returns.
          check: hash every tensor here; the server refuses tensors with other digests.
          expected_digest: refuse the version unless it has this digest.

        Raises:
          InvalidArgument: the adapter is refused, or its memory was written to too early
            (SHARED_MEMORY_DIGEST_MISMATCH; only with check or expected_digest).
          Unavailable: no server listens on the shared-memory socket.
          PermissionDenied: the server runs under another user.
        """
        budget = self._budget(timeout)
        publish = MemoryPublish(
            {
                "name": name,
                "version": version,
                "activate": activate,
                "expected_generation": expected_generation,
                "durable": durable,
                "tags": tags,
                "keep_last": keep_last,
                "pinned": pinned,
                "expected_digest": expected_digest,
            },
            budget,
            shared_memory=shared_memory,
            tensors=tensors,
            model=model,
            model_adapter=model_adapter,
            config=config,
            check=check,
        )
        async with entered(publish) as message:
            answer = await self._ask(
                self._adapters.PublishFromMemory, message, budget.left, retry_for, effects=True
            )
        return _wire.adapter_version(answer.adapter, answer.generation)

    async def activate(
        self,
        name: str,
        version: int | None = None,
        *,
        expected_generation: int | None = None,
        timeout: float | None = None,
        retry_for: float | None = None,
    ) -> t.Activation:
        """Makes a version the active one: activate("a@2") or activate("a", 2).

        Raises Conflict if `expected_generation` is not the registry's.
        """
        name, number, digest = _references.split_ref(name, version)
        message = filled(
            adapters_pb2.ActivateRequest,
            name=name,
            version=number,
            digest=digest,
            expected_generation=expected_generation,
        )
        answer = await self._ask(self._adapters.Activate, message, timeout, retry_for, effects=True)
        return t.Activation(
            _wire.adapter_version(answer.adapter, answer.generation),
            answer.previous_version,
            answer.generation,
        )

    async def adapters(
        self,
        name: str | None = None,
        *,
        timeout: float | None = None,
        retry_for: float | None = None,
    ) -> list[t.AdapterVersion]:
        """All versions (of one name), ordered by name and version; every page is fetched."""
        found: list[t.AdapterVersion] = []
        token = ""
        while True:
            message = filled(
                adapters_pb2.ListRequest, name=name or "", page_size=1000, page_token=token
            )
            answer = await self._ask(self._adapters.List, message, timeout, retry_for)
            found += [_wire.adapter_version(a, answer.generation) for a in answer.adapters]
            token = answer.next_page_token
            if not token:
                return found

    async def adapter(
        self, ref: str, *, timeout: float | None = None, retry_for: float | None = None
    ) -> t.AdapterVersion:
        """One version: "name" (the active one), "name@version" or a `ref`. Raises NotFound."""
        message = filled(adapters_pb2.GetRequest, adapter=ref)
        answer = await self._ask(self._adapters.Get, message, timeout, retry_for)
        return _wire.adapter_version(answer.adapter, answer.generation)

    async def retire(
        self,
        name: str,
        version: int | None = None,
        *,
        force: bool = False,
        timeout: float | None = None,
        retry_for: float | None = None,
    ) -> t.AdapterVersion:
        """Unpublishes a version now: retire("a@1") or retire("a", 1).

        Its memory is freed when the requests that hold it end; with `force` they are aborted.
        """
        name, number, digest = _references.split_ref(name, version)
        message = filled(
            adapters_pb2.RetireRequest, name=name, version=number, digest=digest, force=force
        )
        answer = await self._ask(self._adapters.Retire, message, timeout, retry_for, effects=True)
        return _wire.adapter_version(answer.adapter, answer.generation)

    def watch(
        self, from_generation: int | None = None, *, timeout: float | None = float("inf")
    ) -> Stream[t.WatchEvent]:
        """Registry events with a greater generation, in order; default: from now on. Never ends.

        Never reconnects by itself: after Unavailable, watch from the last event's generation.

        Raises InvalidArgument (OUT_OF_RANGE) when events after `from_generation` are no longer
        kept: call `adapters()` and watch from its generation.
        """
        message = filled(adapters_pb2.WatchRequest, from_generation=from_generation)
        # One attempt: a second one would begin at a later "now" and lose the events between.
        once = Attempts(self._budget(timeout), 0.0)
        return Stream(
            lambda left: self._start(self._adapters.Watch, message, left),
            _wire.watch_event,
            once,
            self._calls,
        )
