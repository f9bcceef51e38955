"""Pixels of images for a server on the same host, through memory that it reads."""

from __future__ import annotations

import os
import threading
from collections import deque

from dorad._shared_memory_socket import Connection
from dorad._stubs import inference_pb2

_ALIGNMENT = 4096


class Region:
    """Pixels in the memory, for as long as this object lives."""

    def __init__(self, owner: SharedPixels, begin: int) -> None:
        self._owner = owner
        self.begin = begin
        self.place = inference_pb2.ImageMemory()
        """Names them to the server."""

    def __del__(self) -> None:
        self._owner._dropped.append(self.begin)  # Without a lock: any thread may run this.


class SharedPixels:
    """One memory file, registered at the server's shared-memory socket. Thread-safe.

    Args:
      path: the server's server.shared_memory_socket.
    """

    BYTES = 1 << 30
    """Pixels that calls may hold in it at the same time. The host's memory holds as many as they
    have held."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._lock = threading.Lock()
        self._used: dict[int, int] = {}  # The end of each region by its beginning.
        self._dropped = deque[int]()  # The beginnings of regions that are in no use any more.
        self._fd = -1
        self._connection: Connection | None = None
        self._memory = 0  # The file's index on the connection.
        self._closed = False

    def write(self, data: bytes) -> Region | None:
        """A copy of the pixels; None: there is no room.

        Raises DoradError: the socket does not take the memory.
        """
        with self._lock:
            if self._closed:
                raise ValueError("the client is closed")
            token = self._registered().session_token
            region = self._reserve(-(-len(data) // _ALIGNMENT) * _ALIGNMENT)
            if region is None:
                return None
            region.place.session_token = token
            region.place.memory = self._memory
            region.place.offset = region.begin
            fd = os.dup(self._fd)  # close() may come meanwhile.
        try:
            left, at = memoryview(data), region.begin
            while left:
                written = os.pwrite(fd, left, at)
                left, at = left[written:], at + written
        finally:
            os.close(fd)
        return region

    def _registered(self) -> Connection:
        if self._fd < 0:
            self._fd = os.memfd_create("dorad-pixels", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, self.BYTES)
        if self._connection is not None and not self._connection.open:
            self._connection.close()  # The server has started anew.
            self._connection = None
        if self._connection is None:
            connection = Connection(self._path)
            try:
                self._memory = connection.offer_file(self._fd, self.BYTES)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _reserve(self, size: int) -> Region | None:
        """In the first gap."""
        while self._dropped:
            del self._used[self._dropped.popleft()]
        begin = 0
        for used, end in sorted(self._used.items()):
            if used - begin >= size:
                break
            begin = end
        if begin + size > self.BYTES:
            return None
        self._used[begin] = begin + size
        return Region(self, begin)

    def close(self) -> None:
        """Ends the registration. Idempotent."""
        with self._lock:
            self._closed = True
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
