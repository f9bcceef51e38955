#!/usr/bin/env python3
"""Compiles the projection's kernels of kernels/isa/mma for every target and prints what ptxas says
of each: registers, shared memory that is not the ring's, and spilled bytes. Exit code 1 if one
spills, or does not compile.

    python tools/kernel_limits.py [TARGET...]       such as 80 120; all by default

Needs nvcc; about half a minute a target. Needs Python's standard library only.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TARGETS = ("80", "86", "89", "90a", "100", "103", "120")
KERNEL = re.compile(
    r"Compiling entry function '\w*?ProjectKernel\w*?MmaIsaILi(\d)EEELi(\d)ELi(\d+)ELb([01])E"
)
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores")
USED = re.compile(r"Used (\d+) registers.*?(\d+) bytes smem")


class Instance(NamedTuple):
    adapted: bool
    tiles: int  # of 64 rows of the batch
    row_warps: int
    panel: int  # rows of W

    def __str__(self) -> str:
        most = 32 if self.row_warps == 2 else 64 * self.tiles
        return f"≤ {most} rows, panels of {self.panel}, {'adapted' if self.adapted else 'base'}"


class Limits(NamedTuple):
    registers: int
    shared: int  # bytes, static
    spilled: int  # bytes


def compile_units(target: str) -> dict[Instance, Limits]:
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    found: dict[Instance, Limits] = {}
    for unit in sorted((ROOT / "kernels/dora").glob("linear_mma_*.cu")):
        command = [nvcc, "-cubin", "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xptxas=-v"]
        command += [f"-I{ROOT}", f"-arch=sm_{target}", "-o", "/dev/null", str(unit)]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode != 0:
            sys.exit(f"{unit.name} does not compile for sm_{target}:\n{run.stderr[-2000:]}")
        for part in run.stderr.split("Compiling entry function")[1:]:
            kernel = KERNEL.search("Compiling entry function" + part)
            spills, used = SPILLS.search(part), USED.search(part)
            if kernel is None or spills is None or used is None:
                sys.exit(f"{unit.name}: ptxas says what this program does not know:\n{part}")
            row_warps, tiles, panel, adapted = map(int, kernel.groups())
            found[Instance(bool(adapted), tiles, row_warps, panel)] = Limits(
                int(used[1]), int(used[2]), int(spills[2])
            )
    return found


def main() -> None:
    targets = sys.argv[1:] or TARGETS
    limits = {target: compile_units(target) for target in targets}
    print("| registers (bytes spilled) | shared |", " | ".join(f"sm_{t}" for t in targets), "|")
    print("|---|---|" + "---|" * len(targets))
    for instance in sorted(limits[targets[0]]):
        cells = [limits[target][instance] for target in targets]
        texts = [f"{c.registers}" + f" ({c.spilled})" * (c.spilled > 0) for c in cells]
        shared = max(c.shared for c in cells) / 1024
        print(f"| {instance} | {shared:.1f} KiB |", " | ".join(texts), "|")
    if any(c.spilled for found in limits.values() for c in found.values()):
        sys.exit("kernels spill registers")


if __name__ == "__main__":
    main()
