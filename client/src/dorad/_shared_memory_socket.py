"""The trainer's side of the server's shared-memory socket, and publishing from memory.

The wire format is described in server/colocation/message.h.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import select
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from dorad._channel import Budget, deadline
from dorad._publish import config_json, from_peft_model, tensor_bytes
from dorad._stubs import adapters_pb2
from dorad.errors import DeadlineExceeded, Unavailable, from_code

_PIECE_BYTES = 16 << 10  # of a digest

_REGISTRATION = struct.Struct("<8sIIQ64s16s")
_MAGIC = b"DORADMEM"
_WEIGHTS = struct.Struct("<8sQ")
_WEIGHTS_MAGIC = b"DORADGET"
_MAX_PIECES = 64
_FILE, _CUDA_IPC = 1, 2
_ANSWER = struct.Struct("<II16s")
_MAX_ANSWER = 512
_ANSWER_SECONDS = 30.0
_ALIGNMENT = 64

_DTYPES = {
    "F32": adapters_pb2.TENSOR_DTYPE_F32,
    "F16": adapters_pb2.TENSOR_DTYPE_F16,
    "BF16": adapters_pb2.TENSOR_DTYPE_BF16,
}


class Connection:
    """A connection to the shared-memory socket. Memory stays registered and leased while it is
    open."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(_ANSWER_SECONDS)
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise Unavailable(
                f"no shared-memory socket at {path}: {error}", code="UNAVAILABLE"
            ) from error
        self.session_token = b""

    def offer_file(self, fd: int, size: int) -> int:
        """Registers a memory file; returns its index."""
        return self._register(_REGISTRATION.pack(_MAGIC, _FILE, 0, size, b"", b""), [fd])

    def offer_cuda(self, handle: bytes, size: int, uuid: bytes) -> int:
        """Registers an allocation on a GPU; returns its index."""
        return self._register(_REGISTRATION.pack(_MAGIC, _CUDA_IPC, 0, size, handle, uuid), [])

    def lease_weights(self, first: int) -> list[int]:
        """Descriptors of the base weights' memory, from this piece on; [] after the last one.

        The first call begins the lease. The caller closes the descriptors.
        """
        count, fds = self._ask(_WEIGHTS.pack(_WEIGHTS_MAGIC, first), [])
        if len(fds) == count:
            return fds
        for fd in fds:
            os.close(fd)
        raise OSError(errno.EMFILE, f"this process has no room for {count} more descriptors")

    def _register(self, message: bytes, fds: list[int]) -> int:
        return self._ask(message, fds)[0]

    def _ask(self, message: bytes, fds: list[int]) -> tuple[int, list[int]]:
        """The answer's number and descriptors."""
        answer, answered = b"", list[int]()
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(self._socket, [message], fds)
            # Also of a server that does not listen.
            answer, answered, _, _ = socket.recv_fds(
                self._socket, _MAX_ANSWER, _MAX_PIECES, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise Unavailable(
                f"the shared-memory socket does not answer: {error}", code="UNAVAILABLE"
            ) from error
        if len(answer) < _ANSWER.size:
            raise Unavailable("the shared-memory socket was closed", code="UNAVAILABLE")
        code, number, session_token = _ANSWER.unpack_from(answer)
        if code != 0:
            reason, _, text = answer[_ANSWER.size :].decode(errors="replace").partition(" ")
            raise from_code(code, reason, text)
        self.session_token = session_token
        return int(number), answered

    @property
    def open(self) -> bool:
        """The server has not closed its end."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return not poll.poll(0)

    def close(self) -> None:
        self._socket.close()


@dataclass(frozen=True)
class _Part:
    """A tensor's bytes in the host's memory, and their place in the buffer."""

    name: str
    dtype: str
    shape: list[int]
    data: memoryview
    offset: int


class _Buffer:
    """One memory file with its own connection, which is closed when the memory is replaced."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._connection: Connection | None = None
        self._fd = -1
        self._map: mmap.mmap | None = None
        self._file_index: int | None = None
        self._cuda_indices: dict[bytes, int] = {}

    def write(
        self, tensors: Mapping[str, Any], check: bool
    ) -> tuple[bytes, list[adapters_pb2.MemoryTensor]]:
        """(session_token, tensors of the request) after copying the tensors in host memory."""
        if not tensors:
            raise ValueError("tensors is empty")
        parts, size = _lay_out({n: x for n, x in tensors.items() if not _is_cuda(x)})
        self._reserve(size)
        connection = self._connect()
        messages = {part.name: self._copy(connection, part, check) for part in parts}
        for name, tensor in tensors.items():
            if name not in messages:
                messages[name] = self._export(connection, name, tensor, check)
        return connection.session_token, list(messages.values())

    def _reserve(self, size: int) -> None:
        if size == 0 or (self._map is not None and len(self._map) >= size):
            return
        self.close()
        self._fd = os.memfd_create("dorad", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, size)
        self._map = mmap.mmap(self._fd, size)

    def _connect(self) -> Connection:
        if self._connection is not None and not self._connection.open:
            self.disconnect()  # The server has restarted.
        if self._connection is None:
            self._connection = Connection(self._path)
        return self._connection

    def disconnect(self) -> None:
        """Ends the registration."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self._file_index = None
        self._cuda_indices = {}

    def _copy(self, connection: Connection, part: _Part, check: bool) -> adapters_pb2.MemoryTensor:
        assert self._map is not None
        if self._file_index is None:
            self._file_index = connection.offer_file(self._fd, len(self._map))
        size = part.data.nbytes
        np.frombuffer(self._map, np.uint8, size, part.offset)[:] = np.frombuffer(
            part.data, np.uint8
        )
        return adapters_pb2.MemoryTensor(
            name=part.name,
            dtype=_DTYPES[part.dtype],
            shape=part.shape,
            memory=self._file_index,
            offset=part.offset,
            digest=tensor_digest(part.data) if check else b"",
        )

    def _export(
        self, connection: Connection, name: str, tensor: Any, check: bool
    ) -> adapters_pb2.MemoryTensor:
        """A tensor on a GPU stays where it is."""
        from dorad import _cuda_ipc  # Loads CUDA's libraries.

        dtype, _, data = tensor_bytes(name, tensor if check else tensor[:0])
        place = _cuda_ipc.export(tensor)
        index = self._cuda_indices.get(place.handle)
        if index is None:
            index = connection.offer_cuda(place.handle, place.size, place.uuid)
            self._cuda_indices[place.handle] = index
        return adapters_pb2.MemoryTensor(
            name=name,
            dtype=_DTYPES[dtype],
            shape=[int(extent) for extent in tensor.shape],
            memory=index,
            offset=place.offset,
            digest=tensor_digest(data) if check else b"",
        )

    def close(self) -> None:
        self.disconnect()
        if self._map is not None:
            self._map.close()
            os.close(self._fd)
        self._map, self._fd = None, -1


def tensor_digest(data: Any) -> bytes:
    """The digest of a tensor's bytes (docs/guides/adapters.md): 32 bytes."""
    view = memoryview(data).cast("B")
    root = hashlib.sha256()
    for begin in range(0, len(view), _PIECE_BYTES):
        root.update(hashlib.sha256(view[begin : begin + _PIECE_BYTES]).digest())
    return root.digest()


def _is_cuda(tensor: Any) -> bool:
    return bool(getattr(tensor, "is_cuda", False))


def _lay_out(tensors: Mapping[str, Any]) -> tuple[list[_Part], int]:
    parts, end = [], 0
    for name, tensor in tensors.items():
        dtype, shape, data = tensor_bytes(name, tensor)
        if dtype not in _DTYPES:
            raise TypeError(f"tensor {name!r} has dtype {dtype}, not one of {', '.join(_DTYPES)}")
        parts.append(_Part(name, dtype, shape, data, end))
        end += -(-data.nbytes // _ALIGNMENT) * _ALIGNMENT
    return parts, end


class SharedTensors:
    """A trainer's memory that a server on the same host reads. Thread-safe; make one and keep it.

    Tensors in the host's memory are copied into one of a few buffers, which are allocated once: the
    trainer may change its own when a publish has begun to send, and the buffer is not written again
    before that publish has ended. Tensors on a GPU are read in place: they must not change until
    the publish has ended.

    The server can read the memory while this object is open and this process lives; a publish that
    has not ended by then is refused. Not usable across fork().

    Args:
      path: the server's server.shared_memory_socket.
      buffers: publishes that may run at the same time; others wait for their end.
    """

    def __init__(self, path: str | os.PathLike[str], *, buffers: int = 2) -> None:
        if buffers < 1:
            raise ValueError(f"buffers must be at least 1, not {buffers}")
        self._free = [_Buffer(os.fspath(path)) for _ in range(buffers)]
        self._changed = threading.Condition()
        self._closed = False

    @contextlib.contextmanager
    def _writing(
        self, tensors: Mapping[str, Any], check: bool, timeout: float | None = None
    ) -> Iterator[tuple[bytes, list[adapters_pb2.MemoryTensor]]]:
        """Holds a buffer with the tensors: gives the session_token and the request's tensors.

        `timeout`: seconds to wait for one.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._free or self._closed, timeout):
                raise DeadlineExceeded(
                    "other publishes use all buffers of the shared tensors",
                    code="DEADLINE_EXCEEDED",
                )
            if self._closed:
                raise ValueError("the shared tensors are closed")
            buffer = self._free.pop(0)
        try:
            yield buffer.write(tensors, check)
        except BaseException:
            # The server may still be reading for an abandoned call; closing the connection makes it
            # fail.
            buffer.disconnect()
            raise
        finally:
            with self._changed:
                self._free.append(buffer)
                if self._closed:
                    buffer.close()
                self._changed.notify()

    def close(self) -> None:
        """Ends the registration; running publishes keep their memory until they end. Idempotent."""
        with self._changed:
            self._closed = True
            for buffer in self._free:
                buffer.close()
            self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class MemoryPublish:
    """One publish from memory: holds a buffer while its `with` block runs.

    Args:
      options: the fields of PublishFromMemoryRequest that do not depend on the tensors, by name.
      budget: for all of it.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        budget: Budget,
        *,
        shared_memory: str | os.PathLike[str] | SharedTensors,
        tensors: Mapping[str, Any] | None,
        model: Any,
        model_adapter: str | None,
        config: Any,
        check: bool,
    ) -> None:
        if (tensors is None) == (model is None):
            raise ValueError("publish_from_memory needs exactly one of tensors and model")
        if model_adapter is not None and model is None:
            raise ValueError("model_adapter needs model")
        if model is not None:
            tensors, own = from_peft_model(model, model_adapter)
            config = own if config is None else config
        elif config is None:
            raise ValueError("publish_from_memory with tensors needs config")
        assert tensors is not None
        self._tensors = tensors
        self._shared_memory_socket = shared_memory
        self._check = check
        self._budget = budget
        self._message = adapters_pb2.PublishFromMemoryRequest(
            adapter_config_json=config_json(config), **options
        )
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> adapters_pb2.PublishFromMemoryRequest:
        """Copies the tensors; returns the request."""
        shared = self._shared_memory_socket
        try:
            if not isinstance(shared, SharedTensors):
                shared = self._stack.enter_context(SharedTensors(shared, buffers=1))
            writing = shared._writing(self._tensors, self._check, deadline(self._budget.left, None))
            self._message.session_token, tensors = self._stack.enter_context(writing)
        except BaseException:
            self._stack.close()
            raise
        self._message.tensors.extend(tensors)
        return self._message

    def __exit__(self, *exc: Any) -> None:
        self._stack.__exit__(*exc)
