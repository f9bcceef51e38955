"""Names of adapters that a server does not take, and back."""

import random

import pytest
from dorad.gateway.rl.names import server_name, server_ref, shown_name

CHOSEN = {
    "policy": "policy",
    "trl-policy-v3": "trl-policy-v3",
    "Policy-V3": "policy-v3--x0-7",
    "Qwen/Qwen3:lora": "qwen_qwen3_lora--x0-4u2f-5-10u3a",
    "_private": "0private--x0u5f",
    "ends-": "ends---x",
    "a b": "a_b--x1u20",
    "Ünï": "0n_--x0udc-2uef",
    "policy-v3--x0-7": "policy-v3--x0-7--x",
    "policy--x9": "policy--x9",
}


@pytest.mark.parametrize(("name", "wanted"), CHOSEN.items())
def test_a_name_comes_back(name, wanted):
    assert server_name(name) == wanted
    assert shown_name(wanted) == name
    assert server_ref(f"{name}@7:0f3c81aa") == f"{wanted}@7:0f3c81aa"


def test_different_names_stay_different_and_come_back():
    letters = "aAbBxX0127u-_./ é"
    random.seed(4)
    names = {"".join(random.choices(letters, k=random.randint(1, 9))) for _ in range(20_000)}
    names |= {name + end for name in list(names)[:4000] for end in ("--x", "--x0", "--x1u41")}
    there = {name: server_name(name) for name in names}
    assert len(set(there.values())) == len(names)
    assert all(shown_name(there[name]) == name for name in names)


@pytest.mark.parametrize(
    "name", ["a--x5", "a--x0ud800", "a--x0u110000", "a--x0u41", "a--x00", "a--x0-", "b--x0-0"]
)
def test_a_name_that_only_looks_translated_is_shown_as_it_is(name):
    assert shown_name(name) == name
