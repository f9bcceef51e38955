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
        self._stream: TextStream | None = (
            text.stream(
                skip_special_tokens=skip_special_tokens,
                stop=stops.strings,
                include_stop=stops.include,
                min_tokens=stops.min_tokens,
            )
            if text is not None
            else None
        )
        self._stops = stops
        self._released = 0
        self._pending: list[Token] = []
        self.count = 0
        """Number of tokens so far, up to the one that completed a stop string."""

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the sample. Later tokens are ignored."""
        return None if self._stream is None else self._stream.stopped

    def push(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float] | None = None,
        top: t.TopLogprobs | None = None,
    ) -> Piece:
        """Adds tokens and returns the new final text."""
        new = ""
        for i, token_id in enumerate(token_ids):
            if self.stopped is not None:
                break
            pairs = (
                list(zip(top.token_ids[i].tolist(), top.logprobs[i].tolist(), strict=True))
                if top is not None
                else []
            )
            logprob = None if logprobs is None else float(logprobs[i])
            offset = 0 if self._stream is None else self._stream.length
            self._pending.append(Token(token_id, logprob, pairs, offset))
            self.count += 1
            if self._stream is not None and (
                self._stops.include or token_id not in self._stops.token_ids
            ):
                new += self._stream.push([token_id])
        return self._release(new)

    def end(self) -> Piece:
        """Ends the sample and returns all text and tokens held back."""
        if self.stopped is not None:
            return Piece()
        piece = self._release("" if self._stream is None else self._stream.finish())
        if self.stopped is None:
            # Tokens without text, such as the end token.
            piece.tokens += self._pending
        self._pending = []
        return piece

    def _release(self, text: str) -> Piece:
        """The new final text with its tokens."""
        self._released += len(text)
        if self._stream is None:
            tokens, self._pending = self._pending, []
        else:
            tokens = [token for token in self._pending if token.offset < self._released]
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
