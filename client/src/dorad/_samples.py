"""Joins the deltas of a Generate stream to samples. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dorad import _wire
from dorad import types as t
from dorad._stubs import inference_pb2
from dorad.errors import Internal


class Samples:
    """Collects the deltas of one Generate stream into samples."""

    def __init__(self, request: t.GenerateRequest) -> None:
        self._request = request
        self._deltas: dict[int, list[t.Delta]] = {}

    def add(self, message: inference_pb2.GenerateResponse) -> None:
        self._deltas.setdefault(message.sample_index, []).append(
            _wire.delta(message, self._request)
        )

    def finish(self) -> list[t.Sample]:
        """The samples in order. Raises Internal when the stream ended without all of them."""
        want = 1 if self._request.n is None else self._request.n
        prompt = next(
            (d.prompt_logprobs for d in self._deltas.get(0, ()) if d.prompt_logprobs), None
        )
        samples = [_sample(deltas, prompt) for _, deltas in sorted(self._deltas.items())]
        if len(samples) != want:
            raise Internal(
                f"the stream ended with {len(samples)} of {want} samples", code="INTERNAL"
            )
        return samples


def _sample(deltas: list[t.Delta], prompt: t.PromptLogprobs | None) -> t.Sample:
    last = deltas[-1]
    if last.finish is None:
        raise Internal(f"sample {last.index} ended without a finish reason", code="INTERNAL")
    some = [d for d in deltas if d.token_ids.size] or [last]
    return t.Sample(
        index=last.index,
        token_ids=np.concatenate([d.token_ids for d in some]),
        logprobs=_joined([d.logprobs for d in some]),
        top_logprobs=_joined_top([d.top_logprobs for d in some]),
        chosen_logprobs=_joined([d.chosen_logprobs for d in some]),
        finish_reason=last.finish.reason,
        stop_token_id=last.finish.stop_token_id,
        stop_sequence=last.finish.stop_sequence,
        detail=last.finish.detail,
        spans=merge_spans(s for d in deltas for s in d.spans),
        usage=last.finish.usage,
        seed=last.seed,
        request_id=last.request_id,
        prompt_logprobs=prompt,
    )


def _joined(parts: Sequence[t.FloatArray | None]) -> t.FloatArray | None:
    present = [part for part in parts if part is not None]
    return np.concatenate(present) if present else None


def _joined_top(parts: Sequence[t.TopLogprobs | None]) -> t.TopLogprobs | None:
    present = [part for part in parts if part is not None]
    if not present:
        return None
    return t.TopLogprobs(
        np.concatenate([part.token_ids for part in present]),
        np.concatenate([part.logprobs for part in present]),
    )


def merge_spans(spans: Iterable[t.Span]) -> list[t.Span]:
    """Joins spans of one version that touch (streams and SWITCH policies cut them)."""
    merged: list[t.Span] = []
    for s in spans:
        last = merged[-1] if merged else None
        if last and (last.adapter, last.version, last.digest, last.end) == (
            s.adapter,
            s.version,
            s.digest,
            s.begin,
        ):
            merged[-1] = t.Span(s.adapter, s.version, s.digest, last.begin, s.end)
        else:
            merged.append(s)
    return merged
