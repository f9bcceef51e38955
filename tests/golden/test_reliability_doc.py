"""docs/faults.md: every fault has its tests, and every test that it names exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAULTS = ROOT / "docs" / "faults.md"
REFERENCE = re.compile(r"`(tests/[\w/.]+)(?:::([\w.]+))?`")
COMMAND = re.compile(r"`make \w+")


def faults() -> list[tuple[str, str, str]]:
    """(fault, what must happen, tests) of each item: "* **Fault.** What must happen." and tests."""
    text = FAULTS.read_text()
    items = re.findall(
        r"^\* \*\*(.+?)\.\*\*(.*?)(?=^\* \*\*|^#|\Z)", text, re.MULTILINE | re.DOTALL
    )
    return [(fault, *item.split("\n    * ", 1)) for fault, item in items]


def references() -> list[tuple[str, str]]:
    text = FAULTS.read_text() + (ROOT / "docs" / "reliability.md").read_text()
    return sorted(set(REFERENCE.findall(text)))


def exists(path: str, name: str) -> bool:
    file = ROOT / path
    if not file.is_file():
        return False
    if not name:
        return True
    text = file.read_text()
    if file.suffix == ".py":
        return re.search(rf"^def {re.escape(name)}\(", text, re.MULTILINE) is not None
    suite, _, test = name.partition(".")
    return re.search(rf"^TEST(_[FP])?\({suite}, {test}\)", text, re.MULTILINE) is not None


@pytest.mark.parametrize("path, name", references(), ids=lambda part: part)
def test_every_test_that_is_named_exists(path: str, name: str) -> None:
    assert exists(path, name), f"named, and not there: {path}::{name}"


def test_every_fault_says_what_must_happen_and_what_shows_it() -> None:
    assert len(faults()) > 40
    for fault in faults():
        assert len(fault) == 3, fault
        _, expected, shown_by = fault
        assert expected.strip(), fault
        assert REFERENCE.search(shown_by) or COMMAND.search(shown_by), fault


def test_a_missing_test_would_be_noticed() -> None:
    assert not exists("tests/integration/test_cancels.py", "test_that_nobody_wrote")
    assert not exists("tests/integration/test_that_nobody_wrote.py", "")
    assert not exists("tests/unit/platform/log_test.cc", "LogTest.ThatNobodyWrote")
