"""Earlier answers as guesses at new ones: see docs/concepts/drafts.md."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import threading
from collections.abc import Sequence

import numpy as np

from dorad import _packing, _references, _wire
from dorad import types as t

# Of a sample that is kept, beside its tokens: Python's objects.
_OBJECT_BYTES = 256


class Answers:
    """Keeps the last answers to prompts, and offers them as drafts when a prompt comes again.

    Give one to `generate_many`, or call `offer` before a `generate` and `keep` after it. Results do
    not depend on it: they come sooner where the policy has moved little since. A prompt is the same
    if its tokens, images, seed, adapter's name (of any version) and sampling parameters are; `n`,
    lengths and stop rules may differ. Thread-safe.

    A new answer follows an old one only under the same seed, or at temperature 0. So a request
    needs a seed: whether prompts that come again have their old one is for the caller to choose
    (docs/guides/client.md, "The same seed with another version").

    Args:
      max_bytes: of kept answers, 4 for a token and 256 for a sample. The least recently used
        prompts make room.
      max_draft_tokens: of one request: the server's, `client.info().limits.max_draft_tokens`.
        Longer answers are offered with their first tokens.
    """

    def __init__(self, *, max_bytes: int = 256 << 20, max_draft_tokens: int = 1 << 18) -> None:
        self._max_bytes = max_bytes
        self._max_draft_tokens = max_draft_tokens
        self._lock = threading.Lock()
        self._bytes = 0
        # The least recently used one first.
        self._kept: collections.OrderedDict[bytes, list[t.IntArray]] = collections.OrderedDict()

    def offer(self, request: t.GenerateRequest) -> t.GenerateRequest:
        """The request with the last answers as `drafts`; itself if there are none, or it has some.

        Raises:
          ValueError: it has no seed, and a temperature other than 0.
        """
        key = _key(request)
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
        if kept is None or request.drafts is not None:
            return request
        drafts = kept[: 1 if request.n is None else request.n]
        longest = self._max_draft_tokens // max(len(drafts), 1)
        return dataclasses.replace(request, drafts=[tokens[:longest] for tokens in drafts])

    def keep(self, request: t.GenerateRequest, samples: Sequence[t.Sample]) -> None:
        """Keeps the answers to a request in place of those before; also parts of answers.

        Raises:
          ValueError: as `offer`.
        """
        key = _key(request)
        # Copies: the samples are the caller's.
        made = [np.array(sample.token_ids, np.int32) for sample in samples]
        size = _size(made)
        with self._lock:
            if (before := self._kept.pop(key, None)) is not None:
                self._bytes -= _size(before)
            if size > self._max_bytes:
                return
            self._kept[key] = made
            self._bytes += size
            while self._bytes > self._max_bytes:
                _, oldest = self._kept.popitem(last=False)
                self._bytes -= _size(oldest)


def _size(kept: Sequence[t.IntArray]) -> int:
    return sum(tokens.nbytes + _OBJECT_BYTES for tokens in kept)


def _key(request: t.GenerateRequest) -> bytes:
    """Of requests that have equal answers under one version, as far as these go."""
    sampling = _wire.sampling_params(request)
    if sampling.HasField("temperature") and sampling.temperature == 0:
        sampling.ClearField("seed")
    elif not sampling.HasField("seed"):
        raise ValueError(
            "answers are offered and kept for requests with a seed (or temperature 0): under"
            " another seed a new answer does not follow the old one"
        )
    prompt = _packing.pack_ids(request.token_ids)
    if request.truncate_prompt_tokens is not None:
        prompt = prompt[-4 * request.truncate_prompt_tokens :]
    name, _, _ = _references.ref_parts(request.adapter or "")
    images = [i.SerializeToString() for i in _packing.pack_images(request.images)]
    digest = hashlib.blake2b(digest_size=16)
    for part in (name.encode(), sampling.SerializeToString(deterministic=True), prompt, *images):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
