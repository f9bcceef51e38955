"""How long a piece of torch's work takes."""

import time
from collections.abc import Callable

import torch


def device_seconds(work: Callable[[], object], device: str) -> float:
    """Of a GPU alone, without the host: it has something else to do until all of the work is in
    line. On the CPU the wall's."""
    if device != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    torch.cuda._sleep(20_000_000)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
