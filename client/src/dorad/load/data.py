"""Data sets of prompts: JSON lines.

A line has one of `token_ids`, `prompt` (text, or token ids) and `messages` (of a chat). It may have
`max_tokens`. Other keys are ignored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dorad.text import ModelText

_KINDS = ("token_ids", "prompt", "messages")


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt."""

    token_ids: list[int]
    max_tokens: int | None = None


def read_samples(path: Path, text: ModelText | None) -> tuple[Sample, ...]:
    """All prompts of a file. `text` is the model's tokenizer, which text needs.

    Raises ValueError that names the file and the line.
    """
    samples = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                samples.append(_sample(json.loads(line), text))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}:{number}: {error}") from error
    if not samples:
        raise ValueError(f"{path} has no prompts")
    return tuple(samples)


def _sample(found: Any, text: ModelText | None) -> Sample:
    given = [kind for kind in _KINDS if isinstance(found, dict) and kind in found]
    if len(given) != 1:
        raise ValueError("expected an object with one of token_ids, prompt and messages")
    value, limit = found[given[0]], found.get("max_tokens")
    if limit is not None and not (type(limit) is int and limit > 0):
        raise ValueError(f"max_tokens is {limit!r}, not a positive integer")
    return Sample(_token_ids(given[0], value, text), limit)


def _token_ids(kind: str, value: Any, text: ModelText | None) -> list[int]:
    if kind == "token_ids" or (kind == "prompt" and isinstance(value, list)):
        if not isinstance(value, list) or not all(type(i) is int and i >= 0 for i in value):
            raise ValueError(f"{kind} is not a list of token ids")
        ids = value
    elif text is None:
        raise ValueError(f"{kind} is text, which needs the model's tokenizer: --model")
    elif kind == "messages":
        ids = text.encode_chat(value)
    elif isinstance(value, str):
        ids = text.encode(value)
    else:
        raise ValueError("prompt is neither text nor token ids")
    if not ids:
        raise ValueError("the prompt is empty")
    return ids
