"""tests/faults/planted.py: every fault fits the sources, and every test that it names exists."""

import re
from pathlib import Path

import pytest
from faults.fault import Fault
from faults.planted import FAULTS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_changes_one_place_and_names_tests_that_exist(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text()
    assert text.count(fault.old) == 1, f"{fault.file}: {fault.old!r}"
    assert fault.new != fault.old
    assert fault.breaks.endswith(".")
    assert fault.units or fault.tests
    for unit in fault.units:
        room, _, named = unit.partition(":")
        emulated = ROOT / "tests" / "emulation" / f"{room.removeprefix('emulation_')}_test.cc"
        sources = [emulated] if emulated.is_file() else (ROOT / "tests/unit" / room).glob("*.cc")
        code = "".join(source.read_text() for source in sources)
        assert code, unit
        for suite in re.findall(r"(?:^|:)\*?(\w+)", named):
            assert re.search(rf"^TEST(_[FP])?\({suite}", code, re.MULTILINE), unit
    for test in fault.tests:
        file, _, name = test.partition("::")
        source = (ROOT / "tests" / file).read_text()
        assert not name or re.search(rf"^def {name}\(", source, re.MULTILINE), test


def test_faults_have_names_of_their_own_and_cover_the_rooms() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 30
    rooms = {
        "server/platform", "server/security", "server/adapter/peft", "server/adapter/store",
        "server/adapter/registry", "server/adapter/residency", "server/adapter/publish",
        "server/model", "server/engine", "server/backends/cpu", "server/colocation", "server/rpc",
        "server/app", "client/src/dorad/_pool.py", "client/src/dorad/_retry.py",
        "client/src/dorad/gateway", "kernels",
    }  # fmt: skip
    assert not {room for room in rooms if not any(f.file.startswith(room) for f in FAULTS)}
