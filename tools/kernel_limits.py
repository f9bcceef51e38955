#!/usr/bin/env python3
"""Compiles the kernels of kernels/isa/mma for every target and prints what ptxas says of each:
registers, static shared memory, and spilled bytes. Exit code 1 if one spills more than MOST_SPILLED
or does not compile: its own assertions hold that a block's shared memory, static and dynamic, fits
into 99 KiB.

    python tools/kernel_limits.py [--units NAME...] [--targets TARGET...]
    python tools/kernel_limits.py --units norm_gemm_mma --targets 80 120

Needs nvcc; about a minute a target for all. Needs Python's standard library only.
"""

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TARGETS = ("80", "86", "89", "90a", "100", "103", "120")
MOST_SHARED = 99 * 1024  # bytes, of a block
MOST_SPILLED = 48  # bytes: twelve of 168 or 255 registers
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
KERNEL = re.compile(r"\d([A-Za-z]\w*?Kernel)I")
NUMBERS = re.compile(r"L[a-z](\d+)E")


class Kernel(NamedTuple):
    unit: str
    order: tuple[int, ...]
    text: str


class Limits(NamedTuple):
    registers: int
    shared: int  # bytes, static
    spilled: int  # bytes, of the kernel and what it calls


def project(row_warps: int, row_blocks: int, tiles: int, panel: int, adapted: int) -> Kernel:
    most = 16 * row_warps * row_blocks * tiles
    text = f"≤ {most} rows, panels of {panel}, {'adapted' if adapted else 'base'}"
    return Kernel("linear", (adapted, most, panel), text)


def norm(reduction: int, columns: int, by_in: int) -> Kernel:
    what = ("W + s·B·A squared", "dots of W Aᵀ and B", "A Aᵀ")[reduction]
    text = f"norm: {what}{', W transposed' if by_in else ''}, tiles of {columns}"
    return Kernel("norm", (reduction, columns, by_in), text)


def attention_rows(heads: int, group: int, shares: int, fp8: int) -> Kernel:
    together = ", some together" if shares else ""
    text = f"attention, rows{together}, heads of {heads}{in_eight(fp8)}, ≤ {8 * group} a group"
    return Kernel("attention", (0, fp8, heads, group, shares), text)


def attention_tiles(heads: int, fp8: int) -> Kernel:
    return Kernel(
        "attention", (1, fp8, heads), f"attention, tiles, heads of {heads}{in_eight(fp8)}"
    )


def in_eight(fp8: int) -> str:
    return " in eight bits" if fp8 else ""


# By the mangled name; the groups are numbers.
KERNELS: tuple[tuple[str, Callable[..., Kernel]], ...] = (
    (r"ProjectKernel\w*?MmaIsaILi(\d)ELi(\d)ELi\dEEELi(\d)ELi(\d+)ELb([01])E", project),
    (
        r"PrefillMmaKernelILi(\d+)E",
        lambda panel: Kernel("linear", (2, panel), f"more rows, panels of {panel}"),
    ),
    (r"RowGemmMmaKernel\w*?ReductionE(\d)ELi(\d+)ELb([01])E", norm),
    (r"RowAttentionKernel\w*?MmaPagesELi(\d+)ELi(\d)ELb([01])ELb([01])E", attention_rows),
    (r"TileAttentionKernel\w*?MmaPagesELi(\d+)ELb([01])E", attention_tiles),
    (
        r"SegmentAttentionKernel\w*?MmaHeadsELi(\d+)E",
        lambda heads: Kernel("images", (heads,), f"images, heads of ≤ {heads}"),
    ),
    (r"StepKernel\w*?MmaIsaILi4E", lambda: Kernel("delta", (), "delta rule, a row")),
    (r"SampleRowsKernel\w*?Unadjusted", lambda: Kernel("sampling", (0,), "sampling")),
    (
        r"SampleRowsKernel\w*?Adjuster",
        lambda: Kernel("sampling", (1,), "sampling, with adjustments"),
    ),
)


def name_of(unit: str, mangled: str) -> Kernel:
    for pattern, name in KERNELS:
        if found := re.search(pattern, mangled):
            return name(*map(int, found.groups()))
    kernel = KERNEL.search(mangled)
    numbers = tuple(int(n) for n in NUMBERS.findall(mangled))
    return Kernel(unit, numbers, f"{kernel[1] if kernel else unit} {numbers}")


def compile_unit(path: Path, target: str) -> dict[Kernel, Limits]:
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    command = [nvcc, "-cubin", "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xptxas=-v"]
    command += [f"-I{ROOT}", f"-arch=sm_{target}", "-o", "/dev/null", str(path)]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(f"{path.name} does not compile for sm_{target}:\n{run.stderr[-2000:]}")
    found: dict[Kernel, Limits] = {}
    for part in run.stderr.split("Compiling entry function")[1:]:
        used, shared = USED.search(part), SHARED.search(part)
        if used is None:
            sys.exit(f"{path.name}: ptxas says what this program does not know:\n{part}")
        found[name_of(path.stem, part.splitlines()[0])] = Limits(
            int(used[1]),
            int(shared[1]) if shared else 0,
            sum(int(spilled) for _, spilled in SPILLS.findall(part)),
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--units", nargs="*", help="of kernels/, without .cu")
    parser.add_argument("--targets", nargs="*", default=TARGETS)
    options = parser.parse_args()
    paths = sorted((ROOT / "kernels").glob("*/*_mma*.cu"))
    if options.units:
        paths = [path for path in paths if path.stem in options.units]
    if not paths:
        sys.exit("no such units")
    limits: dict[str, dict[Kernel, Limits]] = {target: {} for target in options.targets}
    for target, found in limits.items():
        for path in paths:
            found |= compile_unit(path, target)
    targets = list(limits)
    print("| registers (bytes spilled) | shared |", " | ".join(f"sm_{t}" for t in targets), "|")
    print("|---|---|" + "---|" * len(targets))
    for kernel in sorted(limits[targets[0]]):
        cells = [limits[target][kernel] for target in targets]
        texts = [f"{c.registers}" + f" ({c.spilled})" * (c.spilled > 0) for c in cells]
        shared = max(c.shared for c in cells) / 1024
        text = f"{shared:.1f} KiB" if shared >= 0.05 else "–"
        print(f"| {kernel.text} | {text} |", " | ".join(texts), "|")
    all_limits = [each for found in limits.values() for each in found.values()]
    if any(each.spilled > MOST_SPILLED for each in all_limits):
        sys.exit(f"kernels spill more than {MOST_SPILLED} bytes")
    if any(each.shared > MOST_SHARED for each in all_limits):
        sys.exit("kernels have too much shared memory")


if __name__ == "__main__":
    main()
