"""Which of several servers gets a prompt: rendezvous hashing with bounded load.

Prompts that begin alike go to the same server, whose prefix cache has their beginning. A server
that joins or leaves moves its own share of them and no others. A server with more than
`LOAD_FACTOR` times its share of the load is passed over; where prompts wait, one whose home has
room goes first. Pure functions.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from dorad import types as t
from dorad._references import ref_parts

PREFIX_TOKENS = 256
"""Prompts with so many equal first tokens have the same home."""
PREFIX_CHARACTERS = 1024
"""Likewise, where a prompt is not tokenized."""
LOAD_FACTOR = 1.25
LOOK_AHEAD = 32
"""So many prompts that wait are looked at for one whose home has room."""
FULL_QUEUE = 5
"""A server with more requests that wait has no room."""
FULL_KV = 0.9
"""Likewise one that uses a larger share of its KV cache."""


def home_key(adapter: str, token_ids: t.TokenIds) -> bytes:
    """Of all prompts for an adapter that begin alike."""
    return _key(adapter, np.asarray(token_ids[:PREFIX_TOKENS], dtype="<i8").tobytes())


def text_key(adapter: str, text: str) -> bytes:
    """Of all texts for an adapter that begin alike."""
    return _key(adapter, text[:PREFIX_CHARACTERS].encode(errors="replace"))


def _key(adapter: str, first: bytes) -> bytes:
    """`adapter`: all its versions have the same homes, also where only some requests name one."""
    adapter = ref_parts(adapter)[0]
    return hashlib.blake2b(adapter.encode() + b"\0" + first, digest_size=16).digest()


def affinity(target: str, home: bytes) -> int:
    """The server with the highest one is the home."""
    digest = hashlib.blake2b(target.encode(), key=home, digest_size=8).digest()
    return int.from_bytes(digest, "little")


def most_load(loads: Iterable[int]) -> int:
    """How many prompts a server may have, the next one included. At least one server has fewer."""
    counts: Sequence[int] = list(loads)
    return math.ceil(LOAD_FACTOR * (sum(counts) + 1) / len(counts))


def first_at_home(has_room: Iterable[bool]) -> int:
    """The place of the prompt to begin with. `has_room`: of each one's home, in order.

    The first one whose home has room, or the first: the bound holds for it elsewhere.
    """
    looked_at = enumerate(itertools.islice(has_room, LOOK_AHEAD))
    return next((place for place, room in looked_at if room), 0)
