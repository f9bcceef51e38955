"""What the tests of bad input share."""

from collections.abc import Callable

import grpc
import pytest

from lib.server import Server
from lib.wire import Failure, failure

INVALID = grpc.StatusCode.INVALID_ARGUMENT
PROMPT = [11, 12, 13, 14, 15]
WEIGHTS = "adapter_model.safetensors"


def answer(server: Server) -> list[int]:
    """Greedy tokens under the adapter `good`."""
    options = dict(adapter="good", temperature=0.0, max_tokens=8, ignore_eos=True)
    return server.wire.generate(PROMPT, **options)[0].tokens


def refused(call: Callable, *args, **kwargs) -> Failure:
    with pytest.raises(grpc.RpcError) as caught:
        call(*args, **kwargs)
    result = failure(caught.value)
    assert result.domain in ("dorad", ""), result
    return result


def check(refusal: Failure, reason: str, culprit: str, code=INVALID) -> None:
    assert refusal.code == code, refusal
    assert refusal.reason == reason, refusal
    said = refusal.message + " ".join(" ".join(item) for item in refusal.violations)
    assert culprit in said, refusal
