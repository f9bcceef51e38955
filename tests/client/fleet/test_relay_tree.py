"""The relay tree: short paths, few receivers each, and new senders for those that lose theirs."""

import random

import pytest
from dorad.fleet.relay import FAN_OUT, SOURCE, RelayTree


def path(tree, target, limit=10_000):
    """The senders up to the source."""
    found = [target]
    while found[-1] != SOURCE:
        found.append(tree.sender(found[-1]))
        assert len(found) < limit, "a cycle"
    return found


def receivers(tree, targets):
    counts = {}
    for target in targets:
        counts[tree.sender(target)] = counts.get(tree.sender(target), 0) + 1
    return counts


@pytest.mark.parametrize("count", [1, 2, 3, 6, 64, 1024])
def test_nobody_sends_to_more_than_two_and_paths_are_short(count):
    targets = [f"t{n}" for n in range(count)]
    tree = RelayTree(targets)
    assert max(receivers(tree, targets).values()) <= FAN_OUT
    assert max(len(path(tree, target)) - 1 for target in targets) <= count.bit_length()


def test_the_first_orphan_of_the_first_level_takes_the_free_place_at_the_source():
    tree = RelayTree("abcdef")
    assert [tree.sender(t) for t in "abcdef"] == [SOURCE, SOURCE, "a", "a", "b", "b"]
    assert tree.fail("a") == ["c", "d"]
    assert tree.sender("c") == SOURCE
    assert tree.sender("d") == "c"
    with pytest.raises(KeyError):
        tree.sender("a")
    assert tree.fail("a") == []


def test_a_member_leaves_a_bad_sender_but_not_for_its_own_receivers():
    tree = RelayTree("abcdefg")
    assert tree.sender("g") == "c"
    assert tree.move("c", {"a"})
    assert tree.sender("c") == "d"
    assert tree.sender("g") == "c"


def test_without_another_sender_nothing_moves():
    tree = RelayTree("abc")
    assert not tree.move("c", {"a", "b", SOURCE})
    assert tree.sender("c") == "a"


def test_after_any_failures_all_others_still_hang_on_the_source():
    draw = random.Random(11)
    for _ in range(200):
        targets = [f"t{n}" for n in range(draw.randint(1, 40))]
        tree = RelayTree(targets)
        while targets:
            if draw.random() < 0.3:
                target = draw.choice(targets)
                tree.move(target, {tree.sender(target)} - {SOURCE})
            else:
                targets.remove(gone := draw.choice(targets))
                tree.fail(gone)
            for target in targets:
                path(tree, target)
            assert all(n <= FAN_OUT for n in receivers(tree, targets).values())
