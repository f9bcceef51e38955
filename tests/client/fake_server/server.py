"""The server: its listeners, what it remembers, and what steers it."""

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
from dorad.v1 import adapters_pb2_grpc, control_pb2_grpc, inference_pb2_grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from .adapters import FakeAdapters
from .control import FakeControl
from .errors import connection_lost
from .inference import FakeInference


class RoutingRecorder(grpc.ServerInterceptor):
    """Notes which adapter each call names to proxies, as (method, name or None)."""

    def __init__(self):
        self.seen = []

    def intercept_service(self, continuation, details):
        metadata = dict(details.invocation_metadata)
        method = details.method.rpartition("/")[2]
        self.seen.append((method, metadata.get("x-dorad-adapter")))
        return continuation(details)


class FakeServer(FakeInference, FakeAdapters, FakeControl):
    def __init__(self, *, admin_listener=False, port=0, host="127.0.0.1"):
        self.host = host
        self.port = port
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
        self.running_of_others = self.queued = 0
        self.kv_pages_used = 25
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
        self.model_digest = ""
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
        port = self._server.add_insecure_port(f"{self.host}:{self.port}")
        self.target = f"{self.host}:{port}"
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

    def _on_end(self, context):
        with self.lock:
            # Set only when the client went away before the handler was done.
            if context.code() is None and not getattr(context, "dorad_done", False):
                self.cancelled += 1
                self.lock.notify_all()
