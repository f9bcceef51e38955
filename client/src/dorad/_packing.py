"""Packed token ids and log-probabilities, as they travel. Pure functions."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt

from dorad import types as t
from dorad._arguments import check_ids, kind_of_items
from dorad._stubs import inference_pb2
from dorad.errors import Internal

_LITTLE_INT32 = np.dtype("<i4")
_LITTLE_FLOAT32 = np.dtype("<f4")


def pack_ids(token_ids: t.TokenIds, what: str = "token_ids") -> bytes:
    """Packed little-endian int32. Raises TypeError or ValueError naming `what`."""
    check_ids(token_ids, what)
    try:
        array = np.asarray(token_ids)
    except ValueError:
        raise ValueError(f"{what} must have one dimension, not lists of several lengths") from None
    if array.size == 0:
        return b""
    if array.ndim != 1:
        raise ValueError(f"{what} must have one dimension, not shape {list(array.shape)}")
    if array.dtype.kind not in "iu":
        raise TypeError(f"{what} must be integers, not {kind_of_items(array)}")
    if array.dtype != _LITTLE_INT32:
        low, high = int(array.min()), int(array.max())
        if low < -(2**31) or high >= 2**31:
            raise ValueError(f"{what} must fit into int32; they span [{low}, {high}]")
    return np.ascontiguousarray(array, dtype=_LITTLE_INT32).tobytes()


def pack_optional(token_ids: t.TokenIds | None, what: str) -> bytes:
    return b"" if token_ids is None else pack_ids(token_ids, what)


def unpack_ids(data: bytes) -> t.IntArray:
    return np.frombuffer(data, dtype=_LITTLE_INT32).astype(np.int32)


def unpack_floats(data: bytes) -> t.FloatArray:
    return np.frombuffer(data, dtype=_LITTLE_FLOAT32).astype(np.float32)


def _shaped(flat: npt.NDArray[Any], rows: int, columns: int, what: str) -> Any:
    if flat.size != rows * columns:
        raise Internal(
            f"the server sent {flat.size} {what} for {rows} positions x {columns}", code="INTERNAL"
        )
    return flat.reshape(rows, columns)


def chosen_of(data: bytes, rows: int, columns: int) -> t.FloatArray:
    return cast(t.FloatArray, _shaped(unpack_floats(data), rows, columns, "chosen logprobs"))


def top_of(message: inference_pb2.TopLogprobs, rows: int, k: int) -> t.TopLogprobs:
    if rows:
        k = message.k  # Fewer than requested for a smaller vocabulary.
    return t.TopLogprobs(
        _shaped(unpack_ids(message.token_ids), rows, k, "top token ids"),
        _shaped(unpack_floats(message.logprobs), rows, k, "top logprobs"),
    )


def logprobs_of(data: bytes, rows: int) -> t.FloatArray:
    flat = unpack_floats(data)
    if flat.size != rows:
        raise Internal(f"the server sent {flat.size} logprobs for {rows} tokens", code="INTERNAL")
    return flat
