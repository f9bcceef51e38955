#!/usr/bin/env python3
"""Checks the form of the documentation beyond mkdocs' checks.

    tools/docs_check.py          one line for each finding; exit code 1 if there are any
    tools/docs_check.py --fix    wraps prose and writes the generated section first

* Prose has at most 100 columns, a table's row at most 300.
* Every path of this repository in code font exists.
* The generated part of docs/reference/configuration.md is that of deploy/dorad.yaml.

Needs Python's standard library only.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 100
ROW_COLUMNS = 300

FENCE = re.compile(r"^\s*(`{3,}|~{3,})")
ITEM = re.compile(r"^(\s*)([*+-]|\d+\.)(\s+)")
# Lines that are kept as they are: headings, tables, HTML, quotes, images, directives, rules.
KEPT = re.compile(r"^\s*(#{1,6} |\||<|>|!\[|:::|!!!|\[[^]]+\]: |-{3,}$)")
# A marker of a list or a heading must not begin a line: it stays behind the word before it.
STARTER = re.compile(r" (?=(?:[*+#>|-]|\d+\.)(?: |$))")
SPAN = re.compile(r"`[^`\n]{1,60}`")
GLUE = "\u00a0\u2060"

FOLDERS = "server|kernels|client|tests|tools|deploy|demo|proto|docs|bench|cmake"
NAMED = re.compile(rf"(?<![\w/.-])((?:{FOLDERS})/[\w./*{{}},<>-]*)")


def pages() -> list[Path]:
    roots = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "client/README.md"]
    found = [ROOT / name for name in roots]
    return [*found, *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "bench").rglob("*.md"))]


# --- Wrapping -------------------------------------------------------------------------------------


def wrap(text: str) -> str:
    """The page with its paragraphs and list items filled to COLUMNS."""
    done: list[str] = []
    block: list[str] = []
    fence = ""

    def flush() -> None:
        if block:
            done.extend(fill(block))
            block.clear()

    for line in text.split("\n"):
        opening = FENCE.match(line)
        if fence:
            done.append(line)
            if line.strip().startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
        elif opening:
            flush()
            fence = opening[1]
            done.append(line)
        elif not line.strip() or KEPT.match(line) or (line.startswith("    ") and not block):
            flush()
            done.append(line)
        else:
            if ITEM.match(line):
                flush()
            block.append(line)
    flush()
    return "\n".join(done)


def fill(block: list[str]) -> list[str]:
    """One paragraph or list item."""
    item = ITEM.match(block[0])
    if item:
        first = item[0]
        later = " " * len(item[0])
        block = [block[0][item.end() :], *block[1:]]
    else:
        first = later = re.match(r"\s*", block[0])[0]  # type: ignore[index]
    joined = " ".join(line.strip() for line in block)
    joined = SPAN.sub(lambda span: span[0].replace(" ", GLUE), joined)
    joined = STARTER.sub(GLUE, joined)
    lines = textwrap.wrap(
        joined.replace(GLUE, "\ue000"),
        COLUMNS,
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\ue000", " ") for line in lines]


# --- The configuration's keys ---------------------------------------------------------------------

CONFIGURATION = ROOT / "docs" / "reference" / "configuration.md"
BEGIN = "<!-- Generated from deploy/dorad.yaml by tools/docs_check.py --fix: do not edit. -->\n"
END = "<!-- End of the generated part. -->\n"


def explained_keys(text: str) -> Iterator[tuple[str, str, str]]:
    """(section, key or "", explanation) of each section and key of a commented configuration."""
    section, comment = "", []
    for line in text.split("\n"):
        if line.lstrip().startswith("#"):
            comment.append(line.strip()[1:].strip())
            continue
        if match := re.match(r"(\w+):", line):
            section = match[1]
            yield section, "", " ".join(comment)
        elif match := re.match(r"  (\w+):", line):
            yield section, match[1], " ".join(comment)
        comment = []


def configuration_part() -> str:
    parts = []
    for section, key, words in explained_keys((ROOT / "deploy" / "dorad.yaml").read_text()):
        # The file's own words for Markdown: an example in YAML and * are the only special ones.
        words = re.sub(r"; for example preload:.*", ".", words).replace("*", r"\*")
        if not key:
            parts.append(f"\n### {section}\n\n" + (f"{wrap(words)}\n\n" if words else ""))
        else:
            parts.append(wrap(f"* **`{section}.{key}`**: {words}") + "\n")
    return "".join(parts).lstrip("\n") + "\n"


def with_configuration(text: str) -> str:
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n{configuration_part()}{END}{tail}"


# --- Checks ---------------------------------------------------------------------------------------


def too_long(text: str) -> Iterator[tuple[int, str]]:
    fence = ""
    for number, line in enumerate(text.split("\n"), 1):
        opening = FENCE.match(line)
        if fence:
            if line.strip().startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
        elif opening:
            fence = opening[1]
        elif line.lstrip().startswith("|"):
            if len(line) > ROW_COLUMNS:
                yield number, f"a row of {len(line)} columns: at most {ROW_COLUMNS}"
        elif len(line) > COLUMNS and " " in line.strip()[:COLUMNS].lstrip("*- "):
            yield number, f"{len(line)} columns: at most {COLUMNS}"


def expand(path: str) -> list[str]:
    """a/{b,c} as a/b and a/c."""
    match = re.search(r"\{([^{}]*)\}", path)
    if not match:
        return [path]
    return [
        one
        for part in match[1].split(",")
        for one in expand(path[: match.start()] + part + path[match.end() :])
    ]


def missing_paths(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.split("\n"), 1):
        for span in re.findall(r"`([^`]+)`", line):
            for named in NAMED.findall(span):
                for path in expand(named.rstrip(".,")):
                    pattern = re.sub(r"<[^<>]*>", "*", path).rstrip("/")
                    if any(sign in pattern for sign in "{}<>"):
                        continue
                    if not any(ROOT.glob(pattern)):
                        yield number, f"`{path}` does not exist"


def findings() -> Iterator[str]:
    for page in pages():
        name = page.relative_to(ROOT).as_posix()
        text = page.read_text()
        # Logs of measurements keep their original tables and names.
        problems = [] if name.startswith("bench/") else list(too_long(text))
        if name != "CHANGELOG.md" and not name.startswith("bench/"):
            problems += missing_paths(text)
        for number, problem in sorted(problems):
            yield f"{name}:{number}: {problem}"
    text = CONFIGURATION.read_text()
    if with_configuration(text) != text:
        yield f"{CONFIGURATION.relative_to(ROOT)}: differs from deploy/dorad.yaml; --fix writes it"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fix", action="store_true", help="wrap prose, write the generated part")
    if parser.parse_args().fix:
        CONFIGURATION.write_text(with_configuration(CONFIGURATION.read_text()))
        for page in pages():
            page.write_text(wrap(page.read_text()))
    found = list(findings())
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
