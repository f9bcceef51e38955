"""Prints one line for each JUnit file and a verdict. Exits 1 unless every test ran and passed."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Counts:
    passed: int = 0
    skipped: int = 0
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0


def read(path: Path) -> Counts:
    counts = Counts()
    for case in ET.parse(path).getroot().iter("testcase"):
        counts.seconds += float(case.get("time") or 0)
        # ctest reports a failure through the status attribute, pytest through a child.
        if (
            case.find("failure") is not None
            or case.find("error") is not None
            or case.get("status") == "fail"
        ):
            group = case.get("classname") or ""
            name = case.get("name") or ""
            counts.failed.append(name if group in ("", name) else f"{group}::{name}")
        elif case.find("skipped") is not None or case.get("status") in ("notrun", "disabled"):
            counts.skipped += 1
        else:
            counts.passed += 1
    return counts


def main(paths: list[str]) -> int:
    total = Counts()
    print()
    for path in map(Path, paths):
        counts = read(path)
        print(
            f"{path.stem:8} {counts.passed:5} passed {len(counts.failed):4} failed"
            f" {counts.skipped:4} skipped {counts.seconds:8.1f} s"
        )
        for name in counts.failed:
            print(f"         FAILED {name}")
        total.passed += counts.passed
        total.skipped += counts.skipped
        total.failed += counts.failed
    if total.failed or not total.passed:
        print(f"FAILED: {len(total.failed)} of {total.passed + len(total.failed)} tests")
        return 1
    print(f"OK: {total.passed} tests passed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
