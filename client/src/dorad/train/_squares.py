"""||W||² of frozen base weights, kept from one forward to the next."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_Key = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]


@dataclasses.dataclass(frozen=True)
class _Entry:
    storage: Any  # a StorageWeakRef
    version: int
    squares: torch.Tensor


class SquareCache:
    """Row sums of squares by weight. Holds no weight alive. Methods may be called by any thread.

    A weight is known by its storage, geometry and version counter, so views and detached aliases of
    one weight share an entry, and an in-place change or a new storage makes a new one. Writes that
    torch does not count (`weight.data.add_()`) are not seen: `clear()` is for those.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[_Key, _Entry] = {}

    def get(self, weight: torch.Tensor, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The kept squares of `weight`, else what `compute` returns, kept."""
        if weight.is_inference():  # It has no version counter.
            return compute()
        # The weak reference keeps the storage's address from being used again.
        storage: Any = StorageWeakRef(weight.untyped_storage())  # type: ignore[no-untyped-call]
        key = (
            storage.cdata,
            int(weight.storage_offset()),
            weight.shape,
            weight.stride(),
            weight.dtype,
        )
        version = weight._version
        with self._lock:
            entry = self._entries.get(key)
        if entry is not None and entry.version == version:
            return entry.squares
        squares = compute()
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return squares  # Of the graph's memory, and not computed before it is replayed.
        with self._lock:
            self._entries = {k: e for k, e in self._entries.items() if not e.storage.expired()}
            self._entries[key] = _Entry(storage, version, squares)
        return squares

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)
