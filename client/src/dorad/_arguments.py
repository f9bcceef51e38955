"""Arguments of the wrong kind: errors that name the argument."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, SupportsFloat, SupportsIndex, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.descriptor import FieldDescriptor

T = TypeVar("T")
M = TypeVar("M")

_KINDS = {
    FieldDescriptor.CPPTYPE_BOOL: "True or False",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_INT32: "an integer of 32 bits",
    FieldDescriptor.CPPTYPE_INT64: "an integer of 64 bits",
    FieldDescriptor.CPPTYPE_UINT32: "an integer from 0 to 2^32 - 1",
    FieldDescriptor.CPPTYPE_UINT64: "an integer from 0 to 2^64 - 1",
    FieldDescriptor.CPPTYPE_STRING: "text",
    FieldDescriptor.CPPTYPE_MESSAGE: "a mapping of texts",  # tags
}


def shown(value: object) -> str:
    """A value in an error: itself if it is small, else its type."""
    if value is None or isinstance(value, (bool, int, float, np.number)):
        return str(value)
    if isinstance(value, str):
        return repr(value)
    # A version where its name is wanted.
    hint = " (use its ref)" if isinstance(getattr(value, "ref", None), str) else ""
    return type(value).__name__ + hint


def filled(kind: Callable[..., M], **fields: Any) -> M:
    """A protobuf message. Raises TypeError or ValueError that names the field."""
    try:
        return kind(**fields)
    except (TypeError, ValueError):
        for name, value in fields.items():
            try:
                kind(**{name: value})
            except (TypeError, ValueError) as error:
                raise type(error)(_wrong(kind, name, value)) from None
        raise


def _wrong(kind: Any, name: str, value: object) -> str:
    wanted = _KINDS[kind.DESCRIPTOR.fields_by_name[name].cpp_type]
    if isinstance(value, (list, tuple)):
        return f"each of {name} must be {wanted}, not {', '.join(map(shown, value))}"
    return f"{name} must be {wanted}, not {shown(value)}"


def as_seconds(value: object, name: str) -> float:
    """Raises TypeError unless it is a number."""
    if isinstance(value, (str, bytes)) or not isinstance(value, SupportsFloat):
        raise TypeError(f"{name} must be a number of seconds, not {shown(value)}")
    return float(value)


def as_count(value: object, name: str) -> int:
    """Raises TypeError unless it is an integer, or ValueError below 0."""
    if not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} must be an integer, not {shown(value)}")
    if operator.index(value) < 0:
        raise ValueError(f"{name} must be 0 or more, not {value}")
    return operator.index(value)


def items(values: Iterable[T], what: str, wanted: str) -> Iterable[T]:
    """The values. Raises TypeError for text, and for what has no items."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{what} must be a list of {wanted}, not {shown(values)}")
    return values


def check_ids(token_ids: object, what: str) -> None:
    """Raises TypeError for what is no sequence of token ids. Does not look at the ids."""
    if isinstance(token_ids, (str, bytes)):
        raise TypeError(
            f"{what} must be token ids, not text: dorad.text.ModelText makes them of text"
        )
    sequence = hasattr(token_ids, "__len__") and hasattr(token_ids, "__getitem__")
    if not sequence or isinstance(token_ids, Mapping) or getattr(token_ids, "ndim", 1) == 0:
        raise TypeError(f"{what} must be a list or array of integers, not {shown(token_ids)}")


def kind_of_items(array: npt.NDArray[Any]) -> str:
    """What an array has instead of integers."""
    if array.dtype.kind in "US":
        return "text"
    return shown(array.flat[0]) if array.dtype.kind == "O" else str(array.dtype)
