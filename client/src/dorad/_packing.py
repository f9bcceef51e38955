"""Packed token ids and log-probabilities, as they travel. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from dorad import types as t
from dorad._arguments import check_ids, filled, kind_of_items, shown
from dorad._stubs import adapters_pb2, inference_pb2
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


def pack_allowed(token_ids: t.TokenIds | None) -> bytes:
    packed = pack_optional(token_ids, "allowed_token_ids")
    if token_ids is not None and not packed:
        raise ValueError("allowed_token_ids must hold at least one id; None allows all")
    return packed


def pack_biases(biases: Mapping[int, float] | None) -> dict[str, bytes]:
    """The wire's two fields; {} for none. Raises TypeError or ValueError naming logit_bias."""
    if biases is None:
        return {}
    if not isinstance(biases, Mapping):
        raise TypeError(f"logit_bias must map token ids to numbers, not be {shown(biases)}")
    try:
        numbers = np.asarray(list(biases.values()), dtype=_LITTLE_FLOAT32)
    except (TypeError, ValueError):
        raise TypeError("logit_bias must map token ids to numbers") from None
    return {
        "logit_bias_token_ids": pack_ids(list(biases), "logit_bias"),
        "logit_biases": numbers.tobytes(),
    }


_TENSOR_DTYPES = {
    "float32": adapters_pb2.TENSOR_DTYPE_F32,
    "float16": adapters_pb2.TENSOR_DTYPE_F16,
    "bfloat16": adapters_pb2.TENSOR_DTYPE_BF16,
    "uint8": adapters_pb2.TENSOR_DTYPE_U8,
}


def pack_images(
    images: Sequence[t.Image] | None, sequence: int = 0, what: str = "images"
) -> list[inference_pb2.Image]:
    """The wire's form, without pixels: see dorad._aio.images. Raises TypeError naming `what`."""
    packed = []
    for i, image in enumerate(images or ()):
        if not isinstance(image, t.Image):
            raise TypeError(f"{what}[{i}] must be a dorad.Image, not {shown(image)}")
        packed.append(
            filled(
                inference_pb2.Image,
                offset=image.offset,
                length=image.length,
                sha256=image.sha256,
                dtype=_TENSOR_DTYPES[image.dtype],
                grid=image.grid,
                sequence=sequence,
            )
        )
    return packed


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
