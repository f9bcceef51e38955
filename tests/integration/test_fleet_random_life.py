"""Random operations on a fleet of real servers and processes, which die at any moment, behind links
that fail: what a fleet promises holds all the time.

There are 20, and 10,000 in the deep tier. DORAD_RANDOM_OPERATIONS and DORAD_RANDOM_SEED choose how
many and which.
"""

import os
import statistics

import pytest
from lib.fleet_life import Content, Life
from lib.fleet_members import SETTINGS
from lib.fleet_process import MOST_TOKENS, PROMPTS
from lib.server import serve
from lib.tiers import deep

OPERATIONS = int(os.environ.get("DORAD_RANDOM_OPERATIONS", "10000" if deep() else "20"))
SEED = int(os.environ.get("DORAD_RANDOM_SEED", "1"))


def contents_of(zoo) -> list[Content]:
    """From a server that does nothing else."""
    folders = [zoo.adapter("slow", "dora", seed) for seed in range(3)]
    folders += [zoo.adapter("slow", "dora_r64", seed) for seed in range(2)]
    found = []
    named = {f"c{n}": folder for n, folder in enumerate(folders)}
    with serve(zoo.model("slow"), named, SETTINGS) as server:
        for name, folder in named.items():
            options = dict(temperature=0.0, max_tokens=MOST_TOKENS, ignore_eos=True)
            answers = [
                list(server.wire.generate(prompt, adapter=name, **options)[0].tokens)
                for prompt in PROMPTS
            ]
            found.append(Content(folder, server.wire.adapter(name).digest, answers))
    assert len({tuple(content.answers[0]) for content in found}) == len(found)
    return found


@pytest.mark.timeout(300 + 3 * OPERATIONS)
def test_a_fleet_keeps_its_promises_in_a_random_life(zoo, tmp_path, figures):
    life = Life(zoo.model("slow"), contents_of(zoo), tmp_path, SEED)
    try:
        if deep():
            life.begin(members=6, trainers=3, workers=2)
        else:
            life.begin(members=4, trainers=2, workers=1)
        life.live(OPERATIONS)
    except BaseException:
        print(f"--- seed {SEED}: {dict(life.seen)}")
        print(f"--- not as the manifest says: {life.others()}")
        raise
    finally:
        life.close()
    agreements = sorted(life.agreements)
    figures.append(
        f"{OPERATIONS} operations on real servers, seed {SEED}: {life.seen['sample']} samples,"
        f" {len(life.acknowledged)} acknowledged publishes; {len(agreements)} times agreement:"
        f" median {statistics.median(agreements):.2f} s, longest {agreements[-1]:.2f} s"
    )
    figures.extend(f"  {what}: {often}" for what, often in sorted(life.totals().items()))
