"""Versions that servers take from each other: requests for it, and a peer that misbehaves."""

import hashlib
import threading
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from dorad.v1 import adapters_pb2, adapters_pb2_grpc

CHUNK = 1 << 20

ALLOWED = {"peers.allowed": "[127.0.0.1]"}


@dataclass(frozen=True)
class Files:
    config: str
    image: bytes

    @classmethod
    def read(cls, folder: Path) -> "Files":
        image = (folder / "adapter_model.safetensors").read_bytes()
        return cls((folder / "adapter_config.json").read_text(), image)

    @property
    def tensors_sha256(self) -> bytes:
        return hashlib.sha256(self.image).digest()

    def begin(self, name: str, version: int = 1, **changes) -> adapters_pb2.PublishBegin:
        """Of an upload whose id is its adapter's name."""
        values = dict(
            name=name,
            version=version,
            adapter_config_json=self.config,
            safetensors_size=len(self.image),
            safetensors_sha256=self.tensors_sha256,
            upload_id=name,
        )
        return adapters_pb2.PublishBegin(**values | changes)

    def request(
        self, name: str, peer: str, version: int = 1, **changes
    ) -> adapters_pb2.PublishFromPeerRequest:
        values = dict(
            name=name,
            version=version,
            peer=peer,
            upload_id=name,
            adapter_config_sha256=hashlib.sha256(self.config.encode()).digest(),
            safetensors_sha256=self.tensors_sha256,
            safetensors_size=len(self.image),
        )
        return adapters_pb2.PublishFromPeerRequest(**values | changes)

    def wanted(self, name: str) -> adapters_pb2.FetchAdapterRequest:
        """What a server asks its peer for, of version 1."""
        return adapters_pb2.FetchAdapterRequest(
            name=name, version=1, safetensors_sha256=self.tensors_sha256
        )


@dataclass
class FakePeer(adapters_pb2_grpc.AdapterServiceServicer):
    """Serves one adapter's files to anyone, and fails on demand."""

    files: Files
    config: str | None = None  # another one
    image: bytes | None = None  # other bytes
    break_after: int | None = None  # so many bytes
    stop_after: int | None = None  # so many bytes: then it is silent
    asked: list = field(default_factory=list)
    tokens: list = field(default_factory=list)

    def __post_init__(self) -> None:
        self._end = threading.Event()

    def __enter__(self) -> "FakePeer":
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        adapters_pb2_grpc.add_AdapterServiceServicer_to_server(self, self._server)
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._server.stop(None).wait(60)

    def FetchAdapter(self, request, context):
        self.asked.append(request)
        self.tokens.append(dict(context.invocation_metadata()).get("authorization"))
        yield adapters_pb2.FetchAdapterResponse(
            adapter_config_json=self.config or self.files.config
        )
        image = self.files.image if self.image is None else self.image
        offset = request.offset
        while offset < len(image):
            data = image[offset : offset + CHUNK]
            yield adapters_pb2.FetchAdapterResponse(
                chunk=adapters_pb2.PublishChunk(offset=offset, data=data)
            )
            offset += len(data)
            if self.break_after is not None and offset - request.offset >= self.break_after:
                context.abort(grpc.StatusCode.UNAVAILABLE, "broken")
            if self.stop_after is not None and offset - request.offset >= self.stop_after:
                self._end.wait(120)
                return
