"""Links between the documents: every file and every heading that one leads to is there."""

import re
import unicodedata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("bench", "docs", "deploy", "client")
PAGES = sorted(
    [*ROOT.glob("*.md"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*.md"))]
)
LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^(`{3,})[^\n]*\n.*?^\1`*$|(`+)[^\n]*?\2", re.MULTILINE | re.DOTALL)


def links(text: str) -> list[str]:
    """The targets of a page's links to files of this repository."""
    # A link's text may be code, and code may look like a link.
    plain = CODE.sub(lambda code: re.sub(r"[][()]", "", code[0]), text)
    return [target for target in LINK.findall(plain) if not re.match(r"[a-z]+:", target)]


def anchors(text: str) -> set[str]:
    """The names that GitHub gives a page's headings."""
    prose = re.sub(r"^(`{3,}).*?^\1`*$", "", text, flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", prose, re.MULTILINE):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        kept = [sign for sign in shown if sign in " -_" or unicodedata.category(sign)[0] in "LN"]
        name = "".join(kept).replace(" ", "-")
        number = 0
        while (unique := f"{name}-{number}" if number else name) in found:
            number += 1
        found.add(unique)
    return found


def leads_somewhere(page: Path, text: str, target: str) -> bool:
    path, _, anchor = target.partition("#")
    if path:
        file = (page.parent / path).resolve()
        if not file.exists() or not file.is_relative_to(ROOT):
            return False
        text = file.read_text() if anchor else ""
    return not anchor or anchor in anchors(text)


def dead(page: Path, text: str) -> list[str]:
    return [target for target in links(text) if not leads_somewhere(page, text, target)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    assert dead(page, page.read_text()) == []


def test_there_are_links_to_look_at() -> None:
    found = [target for page in PAGES for target in links(page.read_text())]
    assert len(found) > 80 and sum("#" in target for target in found) > 10


def test_dead_links_would_be_noticed() -> None:
    page = ROOT / "docs" / "here.md"
    text = """# `A` heading, with_signs: (two)
## Twice
## Twice
```
# no heading [no](link.md)
```
`[no](link.md)` [a](#a-heading-with_signs-two) [b](#twice-1) [`c`](fidelity.md) [d](https://x.example/)
[e](#twice-2) [f](#no-heading) [g](nothing.md) [h](fidelity.md#nothing) [`i`](../../else.md)
"""
    wrong = ["#twice-2", "#no-heading", "nothing.md", "fidelity.md#nothing", "../../else.md"]
    assert dead(page, text) == wrong
