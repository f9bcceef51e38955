"""Turns the tokens of one sample into text: whole characters only, cut at stop strings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from dorad import types as t
from dorad.text import ModelText, TextStream


@dataclass(slots=True)
class Token:
    """One generated token of an answer."""

    id: int
    logprob: float | None
    top: list[tuple[int, float]]
    """(id, logprob) of the most likely tokens, most likely first."""
    offset: int
    """Characters of the sample's text before it."""


@dataclass(slots=True)
class Piece:
    """New final text and tokens since the last piece."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Stops:
    """Stop conditions of a sample."""

    strings: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()
    """Tokens that end a sample. Their text is left out."""
    include: bool = False
    """Keep the stop string, or the stop token's text."""
    min_tokens: int = 0
    """Stop strings do not count before this many tokens."""


class Assembler:
    """Collects one sample. Not thread-safe.

    Text that could begin a stop string is held back with its tokens, so that a piece is final once
    it is returned. Without a tokenizer (`text` is None) pieces have tokens only.
    """

    def __init__(
        self, text: ModelText | None, stops: Stops, *, skip_special_tokens: bool = True
    ) -> None:
        self._decoder: TextStream | None = (
            text.stream(skip_special_tokens=skip_special_tokens) if text is not None else None
        )
        self._stops = stops
        self._longest = max((len(s) for s in stops.strings), default=0)
        self._text = ""
        self._released = 0
        self._searched = 0  # No valid stop string ends before this point.
        self._pending: list[Token] = []
        self.count = 0
        """Number of tokens so far, up to the one that completed a stop string."""
        self.stopped: str | None = None
        """The stop string that ended the sample. Later tokens are ignored."""

    def push(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float] | None = None,
        top: t.TopLogprobs | None = None,
    ) -> Piece:
        """Adds tokens and returns the new final text."""
        for i, token_id in enumerate(token_ids):
            pairs = (
                list(zip(top.token_ids[i].tolist(), top.logprobs[i].tolist(), strict=True))
                if top is not None
                else []
            )
            logprob = None if logprobs is None else float(logprobs[i])
            self._pending.append(Token(token_id, logprob, pairs, len(self._text)))
            self.count += 1
            if self._decoder is not None and (
                self._stops.include or token_id not in self._stops.token_ids
            ):
                self._text += self._decoder.push([token_id])
            if self._cut():
                return self._release(len(self._text))
        return self._release(len(self._text) - self._held_back())

    def end(self) -> Piece:
        """Ends the sample and returns all text and tokens held back."""
        if self.stopped is not None:
            return Piece()
        if self._decoder is not None:
            self._text += self._decoder.finish()
            if self._cut():
                return self._release(len(self._text))
        piece = self._release(len(self._text))
        # Tokens without text, such as the end token.
        piece.tokens += self._pending
        self._pending = []
        return piece

    def _cut(self) -> bool:
        """Searches for stop strings and cuts the text at the first one."""
        if not self._stops.strings:
            return False
        if self.count <= self._stops.min_tokens:
            self._searched = len(self._text)
            return False
        # Only matches that end after the searched part.
        found = [
            (at, s)
            for s in self._stops.strings
            if (at := self._text.find(s, max(0, self._searched - len(s) + 1))) >= 0
        ]
        self._searched = len(self._text)
        if not found:
            return False
        at, self.stopped = min(found, key=lambda pair: (pair[0], -len(pair[1])))
        self._text = self._text[: at + (len(self.stopped) if self._stops.include else 0)]
        return True

    def _held_back(self) -> int:
        """Length of the longest suffix that could begin a stop string."""
        # Released text begins no stop string, and more text does not change that.
        first = max(self._released, len(self._text) - self._longest + 1)
        for begin in range(first, len(self._text)):
            tail = self._text[begin:]
            if any(s.startswith(tail) for s in self._stops.strings):
                return len(tail)
        return 0

    def _release(self, end: int) -> Piece:
        text = self._text[self._released : end] if end > self._released else ""
        self._released = max(self._released, end)
        if self._decoder is None:
            tokens, self._pending = self._pending, []
        else:
            tokens = [token for token in self._pending if token.offset < end]
            self._pending = self._pending[len(tokens) :]
        return Piece(text, tokens)


def stops_of(
    strings: Sequence[str],
    token_ids: Collection[int],
    *,
    include: bool = False,
    min_tokens: int = 0,
) -> Stops:
    """`Stops` without duplicates."""
    return Stops(tuple(dict.fromkeys(strings)), frozenset(token_ids), include, min_tokens)
