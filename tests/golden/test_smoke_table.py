"""tests/lib/tiers.py: the tests and files that it names exist, for rooms that exist."""

import re

import pytest
from lib.server import ROOT
from lib.tiers import LONG, SMOKE


@pytest.mark.parametrize("room", SMOKE)
def test_every_smoke_test_exists(room: str) -> None:
    assert any((ROOT / parent / room).is_dir() for parent in ("server", "tests/unit"))
    for test in SMOKE[room]:
        path, _, name = test.partition("::")
        function = re.escape(name.partition("[")[0])
        text = (ROOT / "tests" / path).read_text()
        assert re.search(rf"^def {function or 'test_'}", text, re.MULTILINE), test


def test_every_long_file_exists() -> None:
    assert [file for file in LONG if not (ROOT / "tests" / file).is_file()] == []
