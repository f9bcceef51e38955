"""Prints the result of a test run, from the files in its folder: unit/*.xml (GoogleTest, one a
program's shard), programs.xml (CTest: programs that failed as a whole), python.xml (pytest) and
again.xml (pytest's failed tests once more, alone). Exits 1 unless every test passed that ran, and
some did.

With --again it prints nothing and exits 0 if the failures of python.xml deserve a second run: a
few, none of them random, because a random failure may not repeat."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

MOST_AGAIN = 3


@dataclass
class Counts:
    passed: int = 0
    skipped: int = 0
    failed: list[str] = field(default_factory=list)
    passed_alone: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, case: ET.Element) -> None:
        self.seconds += float(case.get("time") or 0)
        # CTest reports a failure through the status attribute, the others through a child.
        if case.get("status") == "fail" or any(
            case.find(child) is not None for child in ("failure", "error")
        ):
            group = case.get("classname") or ""
            name = case.get("name") or ""
            self.failed.append(name if group in ("", name) else f"{group}::{name}")
        elif case.find("skipped") is not None or case.get("status") in ("notrun", "disabled"):
            self.skipped += 1
        else:
            self.passed += 1


def read(paths: Iterable[Path]) -> Counts:
    counts = Counts()
    for path in paths:
        for case in ET.parse(path).getroot().iter("testcase"):
            counts.add(case)
    return counts


def deserve_second_run(failed: list[str]) -> bool:
    return 0 < len(failed) <= MOST_AGAIN and not any("random" in name for name in failed)


def main(folder: Path) -> int:
    groups = {
        "unit": read(sorted(folder.glob("unit/*.xml"))),
        "python": read(folder.glob("python.xml")),
    }
    again = read(folder.glob("again.xml"))
    if again.passed:
        python = groups["python"]
        python.passed_alone = sorted(set(python.failed) - set(again.failed))
        python.passed += len(python.passed_alone)
        python.failed = again.failed
    # A program that crashed has left no file of its own.
    programs = read(folder.glob("programs.xml"))
    print()
    for name, counts in groups.items():
        print(
            f"{name:8} {counts.passed:5} passed {len(counts.failed):4} failed"
            f" {counts.skipped:4} skipped {counts.seconds:8.1f} s"
        )
        for failed in counts.failed:
            print(f"         FAILED {failed}")
        for name in counts.passed_alone:
            print(f"         FAILED beside other tests, passed alone: {name}")
    for failed in programs.failed:
        print(f"         FAILED the program {failed}")
    passed = sum(counts.passed for counts in groups.values())
    failures = sum(len(counts.failed) for counts in groups.values()) or len(programs.failed)
    if failures or not passed:
        print(f"FAILED: {failures} of {passed + failures} tests")
        return 1
    print(f"OK: {passed} tests passed")
    return 0


if __name__ == "__main__":
    if sys.argv[2:] == ["--again"]:
        failures = read([Path(sys.argv[1]) / "python.xml"]).failed
        sys.exit(0 if deserve_second_run(failures) else 1)
    sys.exit(main(Path(sys.argv[1])))
