"""||W||² of frozen base weights, kept from one forward to the next."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_Key = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype, torch.dtype]


@dataclasses.dataclass(frozen=True)
class _Entry:
    storage: Any  # a StorageWeakRef
    version: int
    squares: torch.Tensor
    stream: Any = None  # on CUDA: the torch.cuda.Stream that computes `squares`
    ready: Any = None  # and the torch.cuda.Event after that

    @classmethod
    def of(cls, storage: Any, version: int, squares: torch.Tensor) -> _Entry:
        """Squares that the current stream is computing."""
        if not squares.is_cuda:
            return cls(storage, version, squares)
        stream = torch.cuda.current_stream(squares.device)
        return cls(storage, version, squares, stream, stream.record_event())

    def take(self) -> torch.Tensor:
        """The squares, for later work of the current stream."""
        if self.stream is not None:
            stream = torch.cuda.current_stream(self.squares.device)
            if stream != self.stream:
                stream.wait_event(self.ready)
                # Else its memory would return to the other stream, which does not wait for this
                # one.
                self.squares.record_stream(stream)
        return self.squares


class SquareCache:
    """Row sums of squares by weight. Holds no weight alive. Methods may be called by any thread.

    A weight is identified by its storage, geometry and version counter, so views and detached
    aliases of one weight share an entry, and an in-place change or a new storage makes a new one.
    Writes that torch does not count (`weight.data.add_()`) are not seen: call `clear()` after
    those.

    On CUDA any stream may use the squares. A graph capture neither reads nor writes entries: its
    memory must outlive an entry, and its results exist only after a replay.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[_Key, _Entry] = {}

    def get(
        self, weight: torch.Tensor, dtype: torch.dtype, compute: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """The cached squares of `weight` in `dtype`; calls `compute` without an entry."""
        if weight.is_inference():  # It has no version counter.
            return compute()
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return compute()
        # The weak reference prevents reuse of the storage's address.
        storage: Any = StorageWeakRef(weight.untyped_storage())  # type: ignore[no-untyped-call]
        key = (
            storage.cdata,
            int(weight.storage_offset()),
            weight.shape,
            weight.stride(),
            weight.dtype,
            dtype,
        )
        version = weight._version
        with self._lock:
            entry = self._entries.get(key)
        if entry is not None and entry.version == version:
            return entry.take()
        entry = _Entry.of(storage, version, compute())
        with self._lock:
            self._entries = {k: e for k, e in self._entries.items() if not e.storage.expired()}
            self._entries[key] = entry
        return entry.squares

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)
