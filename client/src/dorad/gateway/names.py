"""Tokens and their log-probabilities in answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dorad import types as t
from dorad.gateway.assembler import Token
from dorad.gateway.samples import first_columns
from dorad.gateway.writing import Rows
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

    def prompt_rows(
        self, prompt: Sequence[int], scores: t.PromptLogprobs | None, top: int | None
    ) -> Rows | None:
        """vLLM's `prompt_logprobs`: by token id, the prompt's token and the `top` most likely ones.

        The rank of a token is its place among these, top + 1 for one that is not among them.
        """
        if scores is None:
            return None
        most_likely = first_columns(scores.top_logprobs, top)

        def row(position: int) -> dict[str, Any] | None:
            if position == 0:
                return None
            token_id = prompt[position]
            pairs = {} if most_likely is None else self._ranked(most_likely, position)
            behind = (float(scores.logprobs[position]), (top or 0) + 1)
            own = pairs.pop(token_id, behind)
            return {str(i): self._ranked_entry(i, *p) for i, p in [(token_id, own), *pairs.items()]}

        return Rows(range(len(prompt)), row)

    @staticmethod
    def _ranked(top: t.TopLogprobs, position: int) -> dict[int, tuple[float, int]]:
        ids, logprobs = top.token_ids[position].tolist(), top.logprobs[position].tolist()
        return {i: (p, rank) for rank, (i, p) in enumerate(zip(ids, logprobs, strict=True), 1)}

    def _ranked_entry(self, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        name = None if self._text is None else self.name(token_id)
        return {"logprob": self.value(logprob), "rank": rank, "decoded_token": name}

    def entry(self, token: Token) -> dict[str, Any]:
        """For /v1/chat/completions."""
        return {
            **self._entry(token.id, token.logprob),
            "top_logprobs": [self._entry(i, p) for i, p in token.top],
        }

    def _entry(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        raw = None if self._text is None else list(self._text.token_bytes(token_id))
        return {"token": self.name(token_id), "logprob": self.value(logprob), "bytes": raw}
