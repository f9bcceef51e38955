"""docs/quickstart.md as a reader follows it: its commands and scripts print what it shows (deep
tier). A text of "..." there stands for anything, a number for one that is near."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from lib.server import ROOT, Server, serve
from lib.smollm2 import converted

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]

TEXT = (ROOT / "docs" / "quickstart.md").read_text()
ADDRESS = "127.0.0.1:50051"
NUMBER = re.compile(r"-?\d+\.\d+")
NEAR = 0.02


def blocks() -> list[tuple[str, str]]:
    """Language and content of each block, from the first request to the last figures."""
    steps = TEXT[TEXT.index("## 2. ") : TEXT.index("## 7. ")]
    return re.findall(r"```(\w*)\n(.*?)```", steps, re.DOTALL)


def steps() -> list[tuple[str, str]]:
    """Commands or a script, and the text after it; "" if none is shown."""
    found: list[tuple[str, str]] = []
    for language, text in blocks():
        if language == "python" or text.startswith(("doractl ", "python ")):
            found.append((text, ""))
        else:
            found[-1] = (found[-1][0], text)
    return found


def is_shown(printed: str, shown: str) -> bool:
    """Word by word, so that widths of columns do not count."""
    words, wanted = printed.split(), shown.split()
    if len(words) != len(wanted):
        return False
    for word, want in zip(words, wanted, strict=True):
        numbers = NUMBER.findall(word), NUMBER.findall(want)
        near = len(numbers[0]) == len(numbers[1]) and all(
            abs(float(a) - float(b)) <= NEAR for a, b in zip(*numbers, strict=True)
        )
        pattern = re.escape(NUMBER.sub("#", want)).replace(re.escape("..."), ".*")
        if "..." not in want and not near:
            return False
        if not re.fullmatch(pattern, NUMBER.sub("#", word)):
            return False
    return True


def run(text: str, server: Server, folder: Path) -> str:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "DORAD_MODEL": str(converted()),
        "DORAD_TARGET": server.grpc,
    }
    if text.startswith(("doractl ", "python ")):
        command = ["bash", "-ec", text]
    else:
        command = [sys.executable, "-c", text]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_step_prints_what_it_shows(tmp_path: Path) -> None:
    assert len(steps()) >= 7
    with serve(converted()) as server:
        for text, shown in steps():
            ours = text.replace(ADDRESS, server.grpc)
            if not shown:  # a script to be saved
                (tmp_path / "publish.py").write_text(ours)
                continue
            printed = run(ours, server, tmp_path)
            assert is_shown(printed, shown), f"{text}\nprinted\n{printed}\nnot\n{shown}"


@pytest.mark.parametrize(
    ("printed", "shown", "same"),
    [
        ("a  1.004 b", "a 1.0 b", True),
        ("a 1.1 b", "a 1.0 b", False),
        ("digest='d0b36579744',", "digest='d0b...',", True),
        ("digest='e0b36579744',", "digest='d0b...',", False),
        ("first after 12 ms", "first after ... ms", True),
        ("[-1.25", "[-1.25", True),
        ("serving now", "serving", False),
    ],
)
def test_words_are_compared_as_a_reader_would(printed: str, shown: str, same: bool) -> None:
    assert is_shown(printed, shown) == same
