"""Which version made which tokens, where several have made a sample."""

from dorad.gateway.samples import _Versions, versions
from dorad.types import Span


def span(version, begin, end):
    return Span("pirate", version, f"digest {version}", begin, end)


def test_spans_are_cut_to_the_pieces_that_are_released():
    found = _Versions()
    assert found.of_next(0, [span(1, 0, 3)]) == [] and found.newest is None
    assert found.of_next(2, [span(1, 3, 5)]) == [span(1, 0, 2)]
    assert found.of_next(4, [span(2, 5, 8)]) == [span(1, 2, 5), span(2, 5, 6)]
    assert found.newest == span(2, 5, 6)
    assert found.of_next(0, []) == [] and found.newest == span(2, 5, 6)
    assert found.of_next(2, []) == [span(2, 6, 8)]


def test_tokens_after_a_stop_string_have_no_span():
    found = _Versions()
    assert found.of_next(3, [span(1, 0, 2), span(2, 2, 3), span(3, 3, 9)]) == [
        span(1, 0, 2),
        span(2, 2, 3),
    ]
    assert found.newest == span(2, 2, 3)


def test_a_choice_shows_its_newest_version_and_all_spans():
    shown = versions([span(1, 0, 2), span(2, 2, 3)], span(2, 2, 3))["dorad"]
    assert (shown["version"], shown["digest"]) == (2, "digest 2")
    assert [(s["version"], s["begin"], s["end"]) for s in shown["spans"]] == [(1, 0, 2), (2, 2, 3)]
    assert versions([], None) == {}
