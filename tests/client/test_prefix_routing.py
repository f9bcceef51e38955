"""Prompts that begin alike meet on one server, and no server gets much more than its share."""

import collections
import random

import numpy as np
import pytest
from dorad._routing import LOAD_FACTOR, affinity, home_key, most_outstanding

TARGETS = [f"10.0.0.{n}:50051" for n in range(8)]


def home_of(targets, key):
    return max(targets, key=lambda target: affinity(target, key))


def test_prompts_that_begin_alike_have_one_home():
    begin = list(range(256))
    key = home_key("a", begin)
    assert home_key("a", [*begin, 7, 8]) == key == home_key("a", np.array(begin, np.int32))
    assert home_key("b", begin) != key
    assert home_key("a", [1, *begin[1:]]) != key
    assert home_key("a", begin[:255]) != key


def test_a_server_that_leaves_moves_its_own_prompts_only():
    keys = [home_key("a", [n]) for n in range(2000)]
    before = {key: home_of(TARGETS, key) for key in keys}
    after = {key: home_of(TARGETS[1:], key) for key in keys}
    moved = {key for key in keys if before[key] != after[key]}
    assert moved == {key for key in keys if before[key] == TARGETS[0]}
    counts = collections.Counter(before.values())
    assert min(counts.values()) > 150 and max(counts.values()) < 350


def test_there_is_always_a_server_below_the_bound():
    draw = random.Random(3)
    for _ in range(1000):
        counts = [draw.choice([0, 0, 1, 5, 100]) for _ in range(draw.randint(1, 20))]
        assert min(counts) < most_outstanding(counts)


@pytest.mark.parametrize("outstanding", [64, 512])
def test_most_prompts_are_at_home_under_zipf_distributed_adapters(outstanding, figures):
    """256 adapters, 16 shared beginnings each; a prompt ends at random."""
    draw = random.Random(9)
    weights = [1 / (rank + 1) for rank in range(256)]
    keys = {
        (adapter, begin): home_key(f"a{adapter}", [begin])
        for adapter in range(256)
        for begin in range(16)
    }
    running, counts = [], dict.fromkeys(TARGETS, 0)
    at_home = total = 0
    for adapter in draw.choices(range(256), weights, k=20_000):
        key = keys[adapter, draw.randrange(16)]
        if len(running) == outstanding:
            at = draw.randrange(outstanding)
            running[at], running[-1] = running[-1], running[at]
            counts[running.pop()] -= 1
        most = most_outstanding(counts.values())
        able = [target for target in TARGETS if counts[target] < most]
        chosen = home_of(able, key)
        counts[chosen] += 1
        running.append(chosen)
        assert counts[chosen] <= most
        assert counts[chosen] <= LOAD_FACTOR * len(running) / len(TARGETS) + 1
        at_home += chosen == home_of(TARGETS, key)
        total += 1
    figures.append(f"{outstanding} prompts on 8 servers, Zipf: {at_home / total:.1%} at home")
    assert at_home > total / 2
