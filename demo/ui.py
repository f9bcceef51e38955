"""Output of the demo's programs: stages with elapsed time, and one clear line on failure."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from rich.console import Console

console = Console(highlight=False)
if not console.is_terminal:
    console.width = 120


def fail(message: str) -> NoReturn:
    print(f"dorad: {message}", file=sys.stderr)
    raise SystemExit(1)


@contextmanager
def stage(title: str) -> Iterator[Callable[[str], None]]:
    """One line with the time a block took. The block may add a note through the value it gets."""
    notes: list[str] = []
    start = time.monotonic()
    if console.is_terminal:
        with console.status(title):
            yield notes.append
    else:
        print(f"{title:<34} ...", flush=True)
        yield notes.append
    console.print(f"{title:<34} {time.monotonic() - start:4.0f} s  [green]ok[/] ", end="")
    console.print("  ".join(notes), markup=False)
