"""Leased memory of the server, mapped for reading only: as torch tensors, without a copy.

A mapping keeps the connection of its lease open, and every tensor keeps its mapping: the lease ends
with the last tensor, or with the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from dorad import _cuda_ipc
from dorad._shared_memory_socket import Connection

_POSIX_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ = 1  # CU_MEM_ACCESS_FLAGS_PROT_READ


class Memory(Protocol):
    """Pieces of memory at consecutive addresses."""

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], offset: int) -> torch.Tensor:
        """A row-major tensor that begins at this byte."""


class HostMemory(mmap.mmap):
    """A sealed memory file. Writing to a tensor in it ends the process (SIGSEGV)."""

    def __new__(cls, connection: Connection, fd: int, size: int) -> HostMemory:
        made = super().__new__(cls, fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
        weakref.finalize(made, connection.close)
        return made

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], offset: int) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(self, dtype=dtype, count=math.prod(shape), offset=offset)
        return flat.view(*shape)


class DeviceMemory:
    """Memory of a GPU. A kernel that writes to a tensor in it breaks the process's CUDA context."""

    def __init__(
        self, connection: Connection, fds: Iterable[int], sizes: Sequence[int], uuid: bytes
    ) -> None:
        self.device = _device(uuid)
        torch.cuda.synchronize(self.device)  # The calls below need the device's context.
        self._address = _reserve(sum(sizes))
        release = weakref.finalize(
            self, _give_back, self._address, tuple(sizes), self.device, connection.close
        )
        # The process's end releases everything by itself, and CUDA may be gone by then.
        release.atexit = False
        for fd, size, offset in zip(fds, sizes, _offsets(sizes), strict=True):
            _map(fd, self._address + offset, size)
        access = _Access(_Location(_ON_DEVICE, self.device.index), _READ)
        _call("cuMemSetAccess", self._address, sum(sizes), ctypes.byref(access), 1)

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], offset: int) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        flat = torch.as_tensor(_Span(self, self._address + offset, size), device=self.device)
        if flat.data_ptr() != self._address + offset:
            raise RuntimeError("torch has copied the server's memory instead of using it")
        return flat.view(dtype).view(*shape)


class _Span:
    """Bytes on the GPU, in the interface by which torch adopts foreign memory."""

    def __init__(self, memory: DeviceMemory, address: int, size: int) -> None:
        self._memory = memory
        # Marked as writable: torch supports no read-only arrays.
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_ADDRESS, _SIZE, _HANDLE = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint64
_ARGUMENTS: dict[str, list[Any]] = {
    "cuMemAddressReserve": [ctypes.c_void_p, _SIZE, _SIZE, _ADDRESS, ctypes.c_uint64],
    "cuMemAddressFree": [_ADDRESS, _SIZE],
    "cuMemImportFromShareableHandle": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int],
    "cuMemMap": [_ADDRESS, _SIZE, _SIZE, _HANDLE, ctypes.c_uint64],
    "cuMemUnmap": [_ADDRESS, _SIZE],
    "cuMemRelease": [_HANDLE],
    "cuMemSetAccess": [_ADDRESS, _SIZE, ctypes.c_void_p, _SIZE],
}


def _call(name: str, *arguments: Any) -> None:
    function = getattr(_cuda_ipc.driver(), name)
    function.argtypes = _ARGUMENTS[name]
    _cuda_ipc.check(function(*arguments), name)


def _device(uuid: bytes) -> torch.device:
    torch.cuda.current_device()  # Starts CUDA.
    for index in range(torch.cuda.device_count()):
        if _cuda_ipc.uuid_of(index) == uuid:
            return torch.device("cuda", index)
    raise RuntimeError("the server's weights lie on a GPU that this process does not see")


def _reserve(size: int) -> int:
    address = _ADDRESS()
    _call("cuMemAddressReserve", ctypes.byref(address), size, 0, 0, 0)
    return int(address.value)


def _map(fd: int, address: int, size: int) -> None:
    handle = _HANDLE()
    # The driver takes the number itself for the pointer, and does not keep the descriptor.
    _call("cuMemImportFromShareableHandle", ctypes.byref(handle), fd, _POSIX_DESCRIPTOR)
    try:
        _call("cuMemMap", address, size, 0, handle.value, 0)
    finally:
        _call("cuMemRelease", handle.value)  # The mapping holds the memory.


def _offsets(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]


def _give_back(
    address: int, sizes: Sequence[int], device: torch.device, close: Callable[[], None]
) -> None:
    # After a failure there is no work to wait for, and some pieces may never have been mapped.
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize(device)
    for size, offset in zip(sizes, _offsets(sizes), strict=True):
        with contextlib.suppress(RuntimeError):
            _call("cuMemUnmap", address + offset, size)
    with contextlib.suppress(RuntimeError):
        _call("cuMemAddressFree", address, sum(sizes))
    close()
