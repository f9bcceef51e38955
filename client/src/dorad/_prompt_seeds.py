"""Seeds of the trainers' requests: those of TRL and verl."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

from dorad.images import Image


def seed_of(text: str) -> int:
    """An unsigned 64-bit seed."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class PromptSeeds:
    """Seeds by prompt: its first request has the first one, the next request the second one.

    After `restart` a prompt that comes again has the same seeds again. Not thread-safe.
    """

    def __init__(self) -> None:
        self._drawn: Counter[int] = Counter()

    def restart(self) -> None:
        """The next request of each prompt is its first one."""
        self._drawn.clear()

    def copy(self) -> PromptSeeds:
        """Goes on from here, without a change of this one."""
        copied = PromptSeeds()
        copied._drawn.update(self._drawn)
        return copied

    def next(self, base: str, token_ids: Sequence[int], images: Sequence[Image] | None) -> int:
        """The seed of a prompt's next request. Under another `base` it is another one."""
        digests = [image.sha256.hex() for image in images or ()]
        prompt = seed_of(f"{base} {list(token_ids)} {digests}")
        self._drawn[prompt] += 1
        return seed_of(f"{prompt} {self._drawn[prompt]}")
