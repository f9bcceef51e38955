"""docs/reliability.md: every fault has its tests, and every test that it names exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = re.compile(r"`(tests/[\w/.]+)(?:::([\w.]+))?`")
COMMAND = re.compile(r"`make \w+")


def rows() -> list[list[str]]:
    """The cells of the tables' rows."""
    text = (ROOT / "docs" / "reliability.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if not line.startswith("| fault |")
    ]


def references() -> list[tuple[str, str]]:
    text = (ROOT / "docs" / "reliability.md").read_text()
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
    assert exists(path, name), f"docs/reliability.md names {path}::{name}"


def test_every_fault_says_what_must_happen_and_what_shows_it() -> None:
    assert len(rows()) > 40
    for row in rows():
        assert len(row) == 4, row
        fault, expected, shown_by, _ = row
        assert fault and expected, row
        assert REFERENCE.search(shown_by) or COMMAND.search(shown_by), row


def test_a_missing_test_would_be_noticed() -> None:
    assert not exists("tests/integration/test_cancels.py", "test_that_nobody_wrote")
    assert not exists("tests/integration/test_that_nobody_wrote.py", "")
    assert not exists("tests/unit/base_log_test.cc", "LogTest.ThatNobodyWrote")
