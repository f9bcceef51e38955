"""Where a decode step's time goes, from what libkernel_trace.so wrote of cuda_step_bench.

    CUDA_INJECTION64_PATH=.../libkernel_trace.so KERNEL_TRACE=trace.txt \\
        cuda_step_bench --adapters 1 --batch 32 --prefill 0 --layers 8
    python3 tests/bench/step_profile.py trace.txt

Kernels begin while those before them still run, so their own times say little. `adds` is by how
much a kernel ends later than all before it: over a step these sum up to the step.
"""

import collections
import itertools
import re
import statistics
import sys

STEPS = 20


def short_name(name: str) -> str:
    found = re.search(r"(\w+?Kernel)", re.sub(r"_GLOBAL__N__\w*?_cu_[0-9a-f]{8}\d*", "", name))
    return re.sub(r"^_Z.*?\d+(?=[A-Z])", "", found.group(1)) if found else name[:30]


def read(path: str) -> list[tuple[int, int, str]]:
    rows = []
    with open(path) as lines:
        for line in lines:
            begin, end, name = line.rstrip("\n").split(" ", 2)
            rows.append((int(begin), int(end), short_name(name)))
    return sorted(rows)


def main() -> None:
    rows = read(sys.argv[1])
    starts = [i for i, row in enumerate(rows) if row[2] == "EmbedKernel"][-STEPS - 1 :]
    adds: dict[str, float] = collections.defaultdict(float)
    own: dict[str, float] = collections.defaultdict(float)
    count: dict[str, int] = collections.defaultdict(int)
    spans = []
    for first, next_first in itertools.pairwise(starts):
        last = rows[first][0]
        for begin, end, name in rows[first:next_first]:
            adds[name] += max(end - last, 0)
            own[name] += end - begin
            count[name] += 1
            last = max(last, end)
        spans.append(last - rows[first][0])
    steps = len(spans)
    print(f"{statistics.median(spans) / 1e3:.1f} us, the median of {steps} steps")
    print(f"{'kernel':30} {'a step':>7} {'adds us':>9} {'each':>8} {'own time':>9}")
    for name in sorted(adds, key=lambda name: -adds[name]):
        print(
            f"{name:30} {count[name] / steps:7.0f} {adds[name] / steps / 1e3:9.1f}"
            f" {adds[name] / count[name] / 1e3:8.2f} {own[name] / count[name] / 1e3:9.2f}"
        )


if __name__ == "__main__":
    main()
