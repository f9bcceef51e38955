"""What cannot be honoured is refused before training starts, all of it at once."""

from __future__ import annotations

from collections.abc import Sequence


class UnsupportedError(ValueError):
    """Settings that the server cannot honour.

    Attributes:
      problems: one sentence for each.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("dorad cannot generate for this trainer:\n  - " + "\n  - ".join(problems))
