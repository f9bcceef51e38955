"""The client's types as JSON."""

from __future__ import annotations

import datetime
import enum
from dataclasses import fields
from typing import Any

import numpy as np


def to_jsonable(value: Any) -> Any:
    """Dataclasses, arrays, enums and times of `dorad.types` as JSON values (NaN becomes None)."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, np.ndarray):
        return to_jsonable(value.tolist())
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    if isinstance(value, dict):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_jsonable(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return {f.name: to_jsonable(getattr(value, f.name)) for f in fields(value)}
    return value
