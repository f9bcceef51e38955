"""Tokens and their log-probabilities in answers."""

from __future__ import annotations

import math
from typing import Any

from dorad.gateway.assembler import Token
from dorad.text import ModelText

_LOWEST = -9999.0  # JSON has no infinity.


class TokenNames:
    """Texts of tokens, for log-probabilities."""

    def __init__(self, text: ModelText | None, *, as_ids: bool) -> None:
        self._text = text
        self._as_ids = as_ids
        self._known: dict[int, str] = {}

    def name(self, token_id: int) -> str:
        """The token's text. A part of a character is written as by OpenAI, "bytes:\\xe2"."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._name(token_id)
        return found

    def _name(self, token_id: int) -> str:
        if self._as_ids or self._text is None:
            return f"token_id:{token_id}"
        raw = self._text.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    @staticmethod
    def value(logprob: float | None) -> float | None:
        if logprob is None or math.isnan(logprob):
            return None
        return max(logprob, _LOWEST)

    def table(self, token: Token) -> dict[str, float | None] | None:
        """For /v1/completions: log-probabilities by name, including the sampled token's."""
        if token.logprob is None:
            return None
        found: dict[str, float | None] = {}
        for token_id, logprob in token.top:
            found.setdefault(self.name(token_id), self.value(logprob))
        found.setdefault(self.name(token.id), self.value(token.logprob))
        return found

    def entry(self, token: Token) -> dict[str, Any]:
        """For /v1/chat/completions."""
        return {
            **self._entry(token.id, token.logprob),
            "top_logprobs": [self._entry(i, p) for i, p in token.top],
        }

    def _entry(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        raw = None if self._text is None else list(self._text.token_bytes(token_id))
        return {"token": self.name(token_id), "logprob": self.value(logprob), "bytes": raw}
