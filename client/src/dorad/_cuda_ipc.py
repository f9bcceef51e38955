"""The address of a torch tensor on a GPU, for another process to open (CUDA IPC)."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HANDLE_BYTES = 64
_UUID_BYTES = 16


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


@dataclass(frozen=True)
class Place:
    """A tensor's place in an allocation."""

    handle: bytes
    """Of the allocation: cudaIpcGetMemHandle."""
    size: int
    """Bytes of the allocation."""
    offset: int
    """Of the tensor in it, in bytes."""
    uuid: bytes
    """Of the GPU."""


@functools.cache
def _runtime() -> Any:
    """The libcudart that torch has loaded: another copy would have its own state."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if "/libcudart" in path:
            return ctypes.CDLL(path)
    raise RuntimeError("torch has loaded no libcudart")


@functools.cache
def driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def check(result: int, what: str) -> None:
    if result != 0:
        raise RuntimeError(f"{what} failed with CUDA error {result}")


@functools.cache
def uuid_of(device: int) -> bytes:
    handle, uuid = ctypes.c_int(), ctypes.create_string_buffer(_UUID_BYTES)
    check(driver().cuDeviceGet(ctypes.byref(handle), device), "cuDeviceGet")
    check(driver().cuDeviceGetUuid_v2(uuid, handle), "cuDeviceGetUuid")
    return uuid.raw


def export(tensor: Any) -> Place:
    """Waits for the current stream's work on the tensor, and finds its place.

    Memory of torch's expandable segments has no handle: leave `expandable_segments` off.
    """
    import torch

    if not tensor.is_contiguous():
        raise ValueError("a tensor on a GPU must be contiguous to be published from there")
    torch.cuda.current_stream(tensor.device).synchronize()
    at = int(tensor.data_ptr())
    begin, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    check(
        driver().cuMemGetAddressRange_v2(
            ctypes.byref(begin), ctypes.byref(size), ctypes.c_uint64(at)
        ),
        "cuMemGetAddressRange",
    )
    check(
        _runtime().cudaIpcGetMemHandle(ctypes.byref(handle), ctypes.c_void_p(begin.value)),
        "cudaIpcGetMemHandle (memory of expandable segments has no handle)",
    )
    return Place(bytes(handle), size.value, at - begin.value, uuid_of(tensor.device.index))
