"""Whether a sample is of the version that was asked for."""

from types import SimpleNamespace

import pytest
from dorad import Span, UnexpectedVersion
from dorad._origin import check_origin

VERSION = SimpleNamespace(name="policy", version=3, digest="abc", label="policy@3")


def sample(tokens, *spans):
    return SimpleNamespace(token_ids=[7] * tokens, spans=[Span(*span) for span in spans])


@pytest.mark.parametrize(
    "it", [sample(4, ("policy", 3, "abc", 0, 4)), sample(0)], ids=["whole", "no token"]
)
def test_a_version_that_made_all_tokens_is_taken(it):
    check_origin(it, VERSION)


@pytest.mark.parametrize(
    "spans",
    [
        [("policy", 2, "abc", 0, 4)],
        [("policy", 3, "abd", 0, 4)],
        [("other", 3, "abc", 0, 4)],
        [("", 0, "", 0, 4)],
        [("policy", 3, "abc", 0, 3)],
        [("policy", 3, "abc", 1, 4)],
        [("policy", 3, "abc", 0, 2), ("policy", 4, "abc", 2, 4)],
        [],
    ],
)
def test_any_other_origin_raises(spans):
    with pytest.raises(UnexpectedVersion, match="expected 4 tokens of policy@3 abc, got"):
        check_origin(sample(4, *spans), VERSION)
