"""docs/reference/errors.md lists every reason that the server can give, and no other."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LITERAL = re.compile(r'"([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*)"')
# Upper-case literals with an underscore that are no reasons.
NOT_REASONS = {
    "CAUSAL_LM", "DORAD_FAILPOINT", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID",
}  # fmt: skip


def used() -> dict[str, str]:
    """Reason -> a file that gives it. Every reason has at least one underscore."""
    found = {}
    for path in sorted((ROOT / "server").rglob("*")):
        if path.suffix not in (".cc", ".h"):
            continue
        name = path.relative_to(ROOT).as_posix()
        for literal in LITERAL.findall(strip_comments(path.read_text())):
            if "_" in literal and literal not in NOT_REASONS:
                found.setdefault(literal, name)
    return found


def strip_comments(text: str) -> str:
    return re.sub(r"//[^\n]*", "", text)


# A status without a reason of its own carries its code's name.
CODES = {
    "CANCELLED", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE",
    "DATA_LOSS", "UNAVAILABLE",
}  # fmt: skip


def rows() -> list[list[str]]:
    """The cells of the tables' rows that begin with a reason."""
    lines = (ROOT / "docs" / "reference" / "errors.md").read_text().splitlines()
    return [line.strip("|").split("|") for line in lines if line.startswith("| `")]


def names(cell: str) -> list[str]:
    return re.findall(r"`([A-Z][A-Z0-9_]+)`", cell)


def documented() -> set[str]:
    return {name for row in rows() for name in names(row[0])}


def test_every_reason_is_documented() -> None:
    missing = {r: f for r, f in used().items() if r not in documented() | CODES}
    missing.pop("MORE_VIOLATIONS", None)  # described in the introduction
    assert not missing, missing


def test_no_documented_reason_is_gone() -> None:
    gone = documented() - set(used()) - CODES
    assert not gone, gone


def test_reasons_are_well_formed() -> None:
    """AIP-193: at most 63 characters of [A-Z][A-Z0-9_]+[A-Z0-9]."""
    for reason in used():
        assert len(reason) <= 63 and re.fullmatch(r"[A-Z][A-Z0-9_]+[A-Z0-9]", reason), reason


def test_documented_codes_are_those_given() -> None:
    """A reason given to MakeError(code, reason, ...) has that code in its row, if one is there."""
    given = {}
    for path in sorted((ROOT / "server").rglob("*.cc")):
        text = strip_comments(path.read_text())
        for code, reason in re.findall(r'StatusCode::k(\w+),\s*"([A-Z][A-Z0-9_]+)"', text):
            name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", code).upper()
            given.setdefault(reason, set()).add(name)
    assert len(given) > 20
    wrong = {}
    for row in rows():
        codes = set(names(row[1])) & (CODES | {"INTERNAL", "UNIMPLEMENTED"})
        for reason in set(names(row[0])) & set(given):
            if codes and len(row) == 4 and codes != given[reason]:
                wrong[reason] = (codes, given[reason])
    assert not wrong, wrong
