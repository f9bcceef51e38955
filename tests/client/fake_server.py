"""A dorad server without a model: the wire contract with deterministic tokens, in this process.

Token t of sample i of a prompt is (sum of the prompt + 10·i + t) mod VOCAB, its log-probability
-(token + 1) / 100. Tests steer it by its public attributes.
"""

import hashlib
import json
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
from dorad.v1 import (
    adapters_pb2,
    adapters_pb2_grpc,
    control_pb2,
    control_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    types_pb2,
)
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

VOCAB = 1000
CONTEXT_LENGTH = 1 << 15
EOS = 2


def fail(context, code, reason, message, violations=(), retry_after=None, facts=None):
    """Ends the call with AIP-193 details, as the real server does."""
    facts = facts or {"k": "v"}
    details = [error_details_pb2.ErrorInfo(reason=reason, domain="dorad", metadata=facts)]
    if violations:
        bad = error_details_pb2.BadRequest()
        for field, why, description in violations:
            bad.field_violations.add(field=field, reason=why, description=description)
        details.append(bad)
    if retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(retry_after * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    trailers = [("grpc-status-details-bin", status.SerializeToString())]
    if retry_after is not None:
        trailers.append(("grpc-retry-pushback-ms", str(int(retry_after * 1000))))
    elif code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        trailers.append(("grpc-retry-pushback-ms", "-1"))
    context.set_trailing_metadata(trailers)
    context.abort(code, message)


def wait_for(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


def unavailable(context):
    context.abort(grpc.StatusCode.UNAVAILABLE, "warming up")


def connection_lost(context):
    context.abort(grpc.StatusCode.UNAVAILABLE, "connection lost")


def shutting_down(context):
    fail(context, grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN", "the server ends", retry_after=1.0)


def overloaded(retry_after):
    """None: it is of no use to come back."""

    def refuse(context):
        fail(
            context,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "QUEUE_FULL",
            "the queue is full",
            retry_after=retry_after,
        )

    return refuse


class RoutingRecorder(grpc.ServerInterceptor):
    """Notes which adapter each call names to proxies, as (method, name or None)."""

    def __init__(self):
        self.seen = []

    def intercept_service(self, continuation, details):
        metadata = dict(details.invocation_metadata)
        method = details.method.rpartition("/")[2]
        self.seen.append((method, metadata.get("x-dorad-adapter")))
        return continuation(details)


def ids(data):
    return np.frombuffer(data, "<i4").tolist()


def pack_ints(values):
    return np.asarray(values, "<i4").tobytes()


def pack_floats(values):
    return np.asarray(values, "<f4").tobytes()


class FakeServer(
    inference_pb2_grpc.InferenceServiceServicer,
    adapters_pb2_grpc.AdapterServiceServicer,
    control_pb2_grpc.ControlServiceServicer,
):
    def __init__(self, *, admin_listener=False):
        self.admin_listener = admin_listener  # Adapters and control are there alone.
        self.lock = threading.Condition()
        self.versions = {}  # (name, version) -> AdapterVersion
        self.active = {}
        self.images = {}  # (name, version) -> (config, image)
        self.chunk_sizes = []
        self.uploads = {}  # upload_id -> received bytes
        self.results = {}  # upload_id -> PublishResponse
        self.publish_begins = []
        self.events = []
        self.generation = 0
        self.paused = False
        self.paused_adapters = []
        self.sleeping = set()
        self.sleep_requests = []
        self.gpu_share_limits = {}  # id -> share
        self.gpu_share_requests = []
        self.pause_modes = []
        self.generate_calls = []
        self.metadata = []
        self.routing = RoutingRecorder()
        self.running = 0
        self.most_running = 0
        self.cancelled = 0
        self.aborts = []
        # Steering.
        self.failing_limits = set()  # INTERNAL for the first call (1), the second, ...
        self.token_delay = 0.0
        self.endless = False
        self.watches = 0
        self.break_watches = 0  # that end before their first event
        self.refuse_generate = []  # of callables(context), one for each call to come
        self.hang_info = False
        self.deny_info = ""  # PERMISSION_DENIED with this message, as a proxy says it
        self.capacity = None  # Overloaded above so many running requests
        self.finish_reason = None  # of every sample, instead of STOP or LENGTH
        self.break_after = None  # break_with after this many messages
        self.break_with = connection_lost
        self.page_size = None
        self.break_uploads_at = []  # UNAVAILABLE when so many bytes have come, one for each call
        self.lose_answers = 0  # UNAVAILABLE after so many commits

    def __enter__(self):
        self._server = self._listener(64)
        self._admin = self._listener(8) if self.admin_listener else self._server
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, self._server)
        adapters_pb2_grpc.add_AdapterServiceServicer_to_server(self, self._admin)
        control_pb2_grpc.add_ControlServiceServicer_to_server(self, self._admin)
        self.health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        self.health.set("", health_pb2.HealthCheckResponse.SERVING)
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        if self.admin_listener:
            self.admin_target = f"127.0.0.1:{self._admin.add_insecure_port('127.0.0.1:0')}"
            self._admin.start()
        return self

    def _listener(self, threads):
        return grpc.server(
            ThreadPoolExecutor(threads),
            options=[("grpc.max_receive_message_length", 64 << 20)],
            interceptors=[self.routing],
        )

    def __exit__(self, *exc):
        with self.lock:
            self.endless = False
            self.lock.notify_all()
        self._server.stop(0.1).wait(5)
        self._admin.stop(0.1).wait(5)

    # --- Inference --------------------------------------------------------------------------------

    def resolve(self, context, ref):
        """(name, version, digest) of a reference, as a span without range."""
        if not ref:
            return types_pb2.VersionSpan()
        name, _, number = ref.partition("@")
        version = int(number) if number else self.active.get(name)
        found = self.versions.get((name, version))
        if found is None:
            fail(context, grpc.StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND", f"no adapter {ref!r}")
        return types_pb2.VersionSpan(adapter=name, version=version, digest=found.digest)

    def Generate(self, request, context):
        with self.lock:
            self.generate_calls.append(request)
            self.metadata.append(dict(context.invocation_metadata()))
            refuse = self.refuse_generate.pop(0) if self.refuse_generate else None
            full = self.capacity is not None and self.running >= self.capacity
            if refuse is None and not full:
                self.running += 1
                self.most_running = max(self.most_running, self.running)
        if refuse is not None:
            refuse(context)
        if full:
            fail(
                context,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "QUEUE_FULL",
                "the queue is full",
                retry_after=0.02,
            )
        context.add_callback(lambda: self._on_end(context))
        try:
            yield from self._tokens(request, context)
        finally:
            with self.lock:
                self.running -= 1
                self.lock.notify_all()

    def _on_end(self, context):
        with self.lock:
            # Set only when the client went away before the handler was done.
            if context.code() is None and not getattr(context, "dorad_done", False):
                self.cancelled += 1
                self.lock.notify_all()

    def _tokens(self, request, context):
        prompt = ids(request.prompt_token_ids)
        if not prompt:
            fail(
                context,
                grpc.StatusCode.INVALID_ARGUMENT,
                "EMPTY_PROMPT",
                "2 problems with the request",
                [("prompt_token_ids", "EMPTY_PROMPT", "is empty"), ("n", "OUT_OF_RANGE", "is 0")],
            )
        span = self.resolve(context, request.adapter)
        n = request.n if request.HasField("n") else 1
        count = request.stop.max_tokens if request.stop.HasField("max_tokens") else 8
        tokens = {i: [(sum(prompt) + 10 * i + t) % VOCAB for t in range(count)] for i in range(n)}
        streaming = request.response_mode == inference_pb2.RESPONSE_MODE_STREAM
        sent = 0
        if streaming:
            position = 0
            while self.endless or position < count:
                if not context.is_active():
                    return
                for i in range(n):
                    token = (sum(prompt) + 10 * i + position) % VOCAB
                    last = not self.endless and position == count - 1
                    if self.break_after is not None and sent >= self.break_after:
                        self.break_with(context)
                    yield self._message(request, span, i, position, [token], last)
                    sent += 1
                position += 1
                time.sleep(self.token_delay)
        else:
            end = time.monotonic() + self.token_delay * count
            while self.endless or time.monotonic() < end:
                if not context.is_active():
                    return
                time.sleep(0.002)
            for i in range(n):
                yield self._message(request, span, i, 0, tokens[i], True)
        context.dorad_done = True

    def _message(self, request, span, index, begin, tokens, last):
        message = inference_pb2.GenerateResponse(
            request_id=request.request_id or "fake",
            sample_index=index,
            token_ids=pack_ints(tokens),
            seed=request.sampling.seed if request.sampling.HasField("seed") else 7,
        )
        message.spans.add().CopyFrom(span)
        message.spans[0].begin, message.spans[0].end = begin, begin + len(tokens)
        if request.HasField("logprobs"):
            message.logprobs = pack_floats([-(x + 1) / 100 for x in tokens])
            k = request.logprobs.top_k
            if k:
                message.top_logprobs.k = k
                message.top_logprobs.token_ids = pack_ints(
                    [[(x + j) % VOCAB for j in range(k)] for x in tokens]
                )
                message.top_logprobs.logprobs = pack_floats(
                    [[-j for j in range(k)] for _ in tokens]
                )
            chosen = ids(request.logprobs.chosen_token_ids)
            message.chosen_logprobs = pack_floats([[-c / 10 for c in chosen] for _ in tokens])
        if last:
            stop = tokens and tokens[-1] in [EOS, *ids(request.stop.stop_token_ids)]
            message.finish.reason = self.finish_reason or (
                types_pb2.FINISH_REASON_STOP if stop else types_pb2.FINISH_REASON_LENGTH
            )
            if stop:
                message.finish.stop_token_id = tokens[-1]
            usage = message.finish.usage
            usage.prompt_tokens = len(ids(request.prompt_token_ids))
            usage.generated_tokens = begin + len(tokens)
            usage.time_to_first_token.FromMilliseconds(1500)
        return message

    def Score(self, request, context):
        adapters = [self.resolve(context, ref) for ref in request.adapters]
        answer = inference_pb2.ScoreResponse(request_id=request.request_id, versions=adapters)
        chosen = ids(request.chosen_token_ids)
        for sequence in request.sequences:
            tokens = ids(sequence.token_ids)
            scored = answer.sequences.add()
            for a, _ in enumerate(adapters):
                score = scored.scores.add()
                score.logprobs = pack_floats([float("nan")] + [-(x + a) / 100 for x in tokens[1:]])
                if request.top_k:
                    score.top_logprobs.k = request.top_k
                    rows = [[-1] * request.top_k] + [list(range(request.top_k))] * (len(tokens) - 1)
                    score.top_logprobs.token_ids = pack_ints(rows)
                    score.top_logprobs.logprobs = pack_floats(
                        [[float("nan") if x < 0 else -x for x in row] for row in rows]
                    )
                score.chosen_logprobs = pack_floats([[-c / 10 for c in chosen] for _ in tokens])
        return answer

    def Abort(self, request, context):
        with self.lock:
            self.aborts.append(request)
        return inference_pb2.AbortResponse(aborted=3)

    # --- Adapters ---------------------------------------------------------------------------------

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
            adapter = self.find(context, request.name, request.version)
            previous = self.active.get(request.name, 0)
            self.set_active(adapter)
            return adapters_pb2.ActivateResponse(
                adapter=adapter, previous_version=previous, generation=self.generation
            )

    def find(self, context, name, version):
        found = self.versions.get((name, version))
        if found is None:
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
            adapter = self.find(context, request.name, request.version)
            adapter.state = types_pb2.ADAPTER_STATE_RETIRING
            adapter.tags["force"] = str(request.force)
            self.note(adapters_pb2.WATCH_EVENT_TYPE_RETIRED, adapter)
            del self.versions[request.name, request.version]
            if self.active.get(request.name) == request.version:
                del self.active[request.name]
            return adapters_pb2.RetireResponse(adapter=adapter, generation=self.generation)

    # --- Control ----------------------------------------------------------------------------------

    def GetInfo(self, request, context):
        while self.hang_info and context.is_active():
            time.sleep(0.01)
        if self.deny_info:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, self.deny_info)
        info = control_pb2.GetInfoResponse(
            version="0.0-fake", device="cpu", generation=self.generation
        )
        info.model.name, info.model.model_type = "fake-model", "llama"
        info.model.vocab_size, info.model.context_length = VOCAB, CONTEXT_LENGTH
        info.model.eos_token_ids.append(EOS)
        info.limits.max_tokens = 2048
        info.engine.running_sequences = self.running
        info.engine.kv_pages_total, info.engine.kv_pages_used = 100, 25
        info.engine.paused = self.paused
        info.engine.paused_adapters.extend(self.paused_adapters)
        info.engine.sleeping.extend(sorted(self.sleeping))
        info.engine.gpu_share = self.gpu_share()
        info.uptime.FromSeconds(90)
        info.memory_bytes["weights"] = 1 << 20
        return info

    def Pause(self, request, context):
        if request.adapter:
            self.paused_adapters.append(request.adapter)
        else:
            self.paused = True
        self.pause_modes.append(request.mode)
        return control_pb2.PauseResponse(affected=2)

    def Sleep(self, request, context):
        self.sleep_requests.append(request)
        new = set(request.tags or ["weights", "kv", "adapters"]) - self.sleeping
        self.sleeping |= new
        return control_pb2.SleepResponse(freed_bytes=dict.fromkeys(new, 1 << 20))

    def Wake(self, request, context):
        self.sleeping -= set(request.tags or ["weights", "kv", "adapters"])
        return control_pb2.WakeResponse()

    def LimitGpuShare(self, request, context):
        with self.lock:
            self.gpu_share_requests.append(request)
            if len(self.gpu_share_requests) in self.failing_limits:
                context.abort(grpc.StatusCode.INTERNAL, "injected")
            self.gpu_share_limits[request.limit_id] = request.gpu_share
            return control_pb2.LimitGpuShareResponse(gpu_share=self.gpu_share())

    def EndGpuShareLimit(self, request, context):
        ended = self.gpu_share_limits.pop(request.limit_id, None) is not None
        return control_pb2.EndGpuShareLimitResponse(ended=ended)

    def gpu_share(self):
        return min([1.0, *self.gpu_share_limits.values()])

    def Resume(self, request, context):
        if request.adapter:
            self.paused_adapters.remove(request.adapter)
        else:
            self.paused = False
        return control_pb2.ResumeResponse()


def image_of(tensors):
    """A safetensors image of {name: float32 array}, written independently of the client."""
    header, data = {}, b""
    for name, array in tensors.items():
        raw = np.asarray(array, "<f4").tobytes()
        span = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": "F32", "shape": list(np.shape(array)), "data_offsets": span}
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data
