"""The seeds of trainers' requests that depend on the prompt."""

import dorad
import numpy as np
from dorad._prompt_seeds import PromptSeeds, seed_of


def image(value):
    return dorad.Image(0, 1, (1, 2, 2), np.full((4, 3), value, np.float32))


CASES = [
    ("7", [1, 2], None),
    ("8", [1, 2], None),
    ("7", [1, 3], None),
    ("7", [1, 2], [image(1)]),
    ("7", [1, 2], [image(2)]),
    ("7", [1, 2], [image(1), image(2)]),
]


def test_a_seed_depends_on_base_prompt_images_and_number():
    seeds = PromptSeeds()
    drawn = [seeds.next(*case) for _ in range(2) for case in CASES]
    assert len(set(drawn)) == len(drawn) and max(drawn) < 2**64
    # And not on the prompts before.
    assert [PromptSeeds().next(*case) for case in CASES] == drawn[: len(CASES)]


def test_after_a_restart_prompts_have_the_same_seeds_in_any_order():
    seeds = PromptSeeds()
    first = {case[0]: [seeds.next(*case) for _ in range(3)] for case in CASES[:2]}
    seeds.restart()
    again = {case[0]: [seeds.next(*case) for _ in range(3)] for case in reversed(CASES[:2])}
    assert again == first


def test_a_copy_goes_on_alone():
    seeds = PromptSeeds()
    first = seeds.next(*CASES[0])
    copied = seeds.copy()
    second = copied.next(*CASES[0])
    assert second == seeds.next(*CASES[0]) != first


def test_seeds_are_the_same_in_every_process():
    assert seed_of("7 3") == 12440419344929910496
