"""The registry: versions, uploads and events."""

import hashlib

import grpc
from dorad.v1 import adapters_pb2, adapters_pb2_grpc, types_pb2

from .errors import fail


class FakeAdapters(adapters_pb2_grpc.AdapterServiceServicer):
    """Works on what FakeServer keeps."""

    def resolve(self, context, ref):
        """(name, version, digest) of a reference, as a span without range."""
        if not ref:
            return types_pb2.VersionSpan()
        name, _, pin = ref.partition("@")
        number, _, digest = pin.partition(":")
        version = int(number) if number else self.active.get(name)
        found = self.versions.get((name, version))
        if found is None or not found.digest.startswith(digest):
            fail(context, grpc.StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND", f"no adapter {ref!r}")
        return types_pb2.VersionSpan(adapter=name, version=version, digest=found.digest)

    def Publish(self, request_iterator, context):
        begin, image = None, bytearray()
        break_at = self.break_uploads_at.pop(0) if self.break_uploads_at else None
        for request in request_iterator:
            part = request.WhichOneof("part")
            if part == "begin":
                begin = request.begin
                self.publish_begins.append(begin)
                if begin.upload_id in self.results:
                    return self._answer(context, begin)
                image = self.uploads.setdefault(begin.upload_id, bytearray())
                if "/" in begin.name:
                    fail(
                        context,
                        grpc.StatusCode.INVALID_ARGUMENT,
                        "BAD_NAME",
                        f"bad adapter name {begin.name!r}",
                        [("name", "BAD_NAME", "has a slash")],
                    )
            elif part == "chunk":
                if request.chunk.offset != len(image):
                    code = grpc.StatusCode.INVALID_ARGUMENT
                    fail(context, code, "PUBLISH_OFFSET_MISMATCH", "chunks out of order")
                self.chunk_sizes.append(len(request.chunk.data))
                image += request.chunk.data
                if break_at is not None and len(image) >= break_at:
                    context.abort(grpc.StatusCode.UNAVAILABLE, "connection lost")
            else:
                assert len(image) == begin.safetensors_size
                if hashlib.sha256(image).digest() != begin.safetensors_sha256:
                    fail(context, grpc.StatusCode.INVALID_ARGUMENT, "SHA256_MISMATCH", "mismatch")
                adapter = self.add(context, begin, bytes(image))
                self.results[begin.upload_id] = adapters_pb2.PublishResponse(
                    adapter=adapter, generation=self.generation
                )
                return self._answer(context, begin)
        context.abort(grpc.StatusCode.CANCELLED, "no commit")

    def _answer(self, context, begin):
        if self.lose_answers > 0:
            self.lose_answers -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "connection lost")
        return self.results[begin.upload_id]

    def GetUpload(self, request, context):
        if request.upload_id not in self.uploads:
            fail(context, grpc.StatusCode.NOT_FOUND, "UPLOAD_NOT_FOUND", "no such upload")
        return adapters_pb2.GetUploadResponse(
            received_bytes=len(self.uploads[request.upload_id]),
            committed=request.upload_id in self.results,
        )

    def PublishFromPath(self, request, context):
        adapter = self.add(context, request, request.path.encode())
        return adapters_pb2.PublishFromPathResponse(adapter=adapter, generation=self.generation)

    def add(self, context, begin, image):
        """Registers a version; `begin` is PublishBegin or PublishFromPathRequest."""
        with self.lock:
            latest = max([v for n, v in self.versions if n == begin.name], default=0)
            version = begin.version if begin.HasField("version") else latest + 1
            if version <= latest:
                fail(context, grpc.StatusCode.ALREADY_EXISTS, "VERSION_EXISTS", "version exists")
            adapter = types_pb2.AdapterVersion(
                name=begin.name,
                version=version,
                digest=hashlib.sha256(image).hexdigest(),
                state=types_pb2.ADAPTER_STATE_READY,
                kind=types_pb2.ADAPTER_KIND_DORA,
                min_rank=4,
                max_rank=16,
                resident_bytes=len(image),
                durable=begin.durable,
                tags=begin.tags,
            )
            adapter.timing.norms.FromMilliseconds(250)
            adapter.create_time.GetCurrentTime()
            self.versions[begin.name, version] = adapter
            self.images[begin.name, version] = (
                getattr(begin, "adapter_config_json", ""),
                image,
            )
            self.note(adapters_pb2.WATCH_EVENT_TYPE_PUBLISHED, adapter)
            if begin.activate:
                self.set_active(adapter)
            return adapter

    def set_active(self, adapter):
        for other in self.versions.values():
            if other.name == adapter.name:
                other.active = other.version == adapter.version
        self.active[adapter.name] = adapter.version
        self.note(adapters_pb2.WATCH_EVENT_TYPE_ACTIVATED, adapter)

    def note(self, kind, adapter):
        self.generation += 1
        event = adapters_pb2.WatchResponse(generation=self.generation, type=kind)
        event.adapter.CopyFrom(adapter)
        self.events.append(event)
        self.lock.notify_all()

    def Activate(self, request, context):
        with self.lock:
            wanted = request.expected_generation
            if request.HasField("expected_generation") and wanted != self.generation:
                facts = {"current_generation": str(self.generation)}
                code = grpc.StatusCode.ABORTED
                fail(context, code, "GENERATION_MOVED", "the registry moved", facts=facts)
            adapter = self.find(context, request.name, request.version, request.digest)
            previous = self.active.get(request.name, 0)
            self.set_active(adapter)
            return adapters_pb2.ActivateResponse(
                adapter=adapter, previous_version=previous, generation=self.generation
            )

    def find(self, context, name, version, digest=""):
        found = self.versions.get((name, version))
        if found is None or not found.digest.startswith(digest):
            message = f"no adapter {name}@{version}"
            fail(context, grpc.StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND", message)
        return found

    def Get(self, request, context):
        span = self.resolve(context, request.adapter)
        adapter = self.versions[span.adapter, span.version]
        return adapters_pb2.GetResponse(adapter=adapter, generation=self.generation)

    def List(self, request, context):
        rows = [v for _, v in sorted(self.versions.items()) if request.name in ("", v.name)]
        start = int(request.page_token or 0)
        size = self.page_size or request.page_size
        more = start + size < len(rows)
        return adapters_pb2.ListResponse(
            adapters=rows[start : start + size],
            next_page_token=str(start + size) if more else "",
            generation=self.generation,
        )

    def Watch(self, request, context):
        self.watches += 1
        if self.break_watches:
            self.break_watches -= 1
            context.send_initial_metadata(())
            context.abort(grpc.StatusCode.UNAVAILABLE, "goes away")
        if request.HasField("from_generation") and request.from_generation < 0:
            fail(context, grpc.StatusCode.OUT_OF_RANGE, "GENERATION_TOO_OLD", "too old")
        seen = request.from_generation if request.HasField("from_generation") else self.generation
        context.add_callback(lambda: self._on_end(context))
        while context.is_active():
            with self.lock:
                fresh = [e for e in self.events if e.generation > seen]
                if not fresh:
                    self.lock.wait(0.02)
            for event in fresh:
                yield event
                seen = event.generation

    def Retire(self, request, context):
        with self.lock:
            adapter = self.find(context, request.name, request.version, request.digest)
            adapter.state = types_pb2.ADAPTER_STATE_RETIRING
            adapter.tags["force"] = str(request.force)
            self.note(adapters_pb2.WATCH_EVENT_TYPE_RETIRED, adapter)
            del self.versions[request.name, request.version]
            if self.active.get(request.name) == request.version:
                del self.active[request.name]
            return adapters_pb2.RetireResponse(adapter=adapter, generation=self.generation)
