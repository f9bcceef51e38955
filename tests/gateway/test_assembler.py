"""Text of one sample: whole characters, stop strings across tokens, tokens beside their text."""

import random

import pytest
from dorad.gateway.assembler import Assembler, stops_of


def run(text, ids, stops, size=1, **options):
    """(the shown pieces' texts, all shown tokens, the assembler)."""
    assembler = Assembler(text, stops, **options)
    pieces = []
    for begin in range(0, len(ids), size):
        pieces.append(assembler.push(ids[begin : begin + size], [-0.5] * size))
        if assembler.stopped is not None:
            break
    pieces.append(assembler.end())
    return [p.text for p in pieces], [t for p in pieces for t in p.tokens], assembler


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("words", ["plain words", "日本語と🙂 ok", "é", ""])
def test_pieces_join_to_the_text_and_all_tokens(text, words, size):
    ids = text.encode(words, special_tokens=False)
    texts, tokens, assembler = run(text, ids, stops_of([], [2]), size)
    assert "".join(texts) == words and [t.id for t in tokens] == ids
    assert assembler.count == len(ids) and assembler.stopped is None


def test_random_stop_strings_cut_where_a_search_of_the_whole_text_would(text):
    rng = random.Random(3)
    for _ in range(300):
        words = "".join(rng.choices("ab é🙂", k=rng.randint(0, 30)))
        stops = ["".join(rng.choices("ab é🙂", k=rng.randint(1, 4))) for _ in range(3)]
        ids = text.encode(words, special_tokens=False)
        texts, tokens, assembler = run(text, ids, stops_of(stops, []), rng.randint(1, 4))
        # The first to be complete counts, and of those the one that begins first.
        ends = [words.find(s) + len(s) for s in stops if s in words]
        begins = [
            words.find(s) for s in stops if s in words and words.find(s) + len(s) == min(ends)
        ]
        shown = "".join(texts)
        if ends:
            assert assembler.stopped in stops and shown == words[: len(shown)]
            assert not any(s in shown for s in stops)
            assert len(shown) <= min(begins)
        else:
            assert shown == words and [t.id for t in tokens] == ids
        assert all(t.offset < len(shown) for t in tokens if ends)


def test_what_could_begin_a_stop_string_is_held_back(text):
    assembler = Assembler(text, stops_of(["bcd"], []))
    ids = [text.encode(c, special_tokens=False)[0] for c in "abcxbcd"]
    shown = [assembler.push([i]).text for i in ids]
    assert shown == ["a", "", "", "bcx", "", "", ""]
    assert assembler.stopped == "bcd" and assembler.end().text == ""


def test_looking_for_the_beginning_of_a_stop_string_is_no_work_where_there_is_none(text):
    class Counted(str):
        compared = 0

        def startswith(self, *args):
            Counted.compared += 1
            return str.startswith(self, *args)

    ids = [text.encode(c, special_tokens=False)[0] for c in "abc" * 200]
    texts, _, _ = run(text, ids, stops_of([Counted("z" * 256)], []))
    assert "".join(texts) == "abc" * 200
    assert 0 < Counted.compared <= 600  # Each character once.


def test_the_stop_string_can_be_kept(text):
    ids = text.encode("one two three", special_tokens=False)
    texts, _, _ = run(text, ids, stops_of(["two"], [], include=True))
    assert "".join(texts) == "one two"


def test_stop_strings_before_min_tokens_are_text(text):
    ids = [text.encode(c, special_tokens=False)[0] for c in "xyxyxy"]
    texts, _, assembler = run(text, ids, stops_of(["xy"], [], min_tokens=2))
    assert "".join(texts) == "xy" and assembler.count == 4


def test_the_text_of_a_stop_token_is_left_out(text):
    a, b = text.encode("b", special_tokens=False), text.encode("c", special_tokens=False)
    texts, tokens, _ = run(text, [*a, *b], stops_of([], b))
    assert "".join(texts) == "b" and [t.id for t in tokens] == [*a, *b]
    texts, _, _ = run(text, [*a, *b], stops_of([], b, include=True))
    assert "".join(texts) == "bc"


def test_an_unfinished_character_shows_at_the_end(text):
    ids = text.encode("🙂", special_tokens=False)
    texts, tokens, _ = run(text, ids[:2], stops_of([], []))
    assert texts == ["", "", "\N{REPLACEMENT CHARACTER}"] and len(tokens) == 2


def test_special_tokens_can_be_shown(text):
    assert "".join(run(text, [1, 40, 2], stops_of([], []), skip_special_tokens=False)[0]) == (
        "<s>" + text.decode([40]) + "</s>"
    )


def test_without_a_tokenizer_there_are_tokens_only():
    texts, tokens, assembler = run(None, [5, 6, 7], stops_of([], []))
    assert "".join(texts) == "" and [t.id for t in tokens] == [5, 6, 7] and assembler.count == 3


def test_token_bytes_join_to_the_text(text):
    words = "naïve 日本語 🙂 words\n"
    ids = text.encode(words)
    assert b"".join(text.token_bytes(i) for i in ids[1:]).decode() == words
    assert text.token_bytes(1) == b"<s>" and text.token_bytes(10_000) == b""
