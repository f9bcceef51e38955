"""What cannot be honoured is refused before training starts, all of it at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class UnsupportedError(ValueError):
    """Settings that the server cannot honour.

    Attributes:
      problems: one sentence for each.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("dorad cannot generate for this trainer:\n  - " + "\n  - ".join(problems))

    def __reduce__(self) -> tuple[Any, ...]:
        """For other processes: pickle would make it of its message."""
        return type(self), (self.problems,)
