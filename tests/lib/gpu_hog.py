"""Another process on the server's GPU, that takes all of its memory but a little."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

LIFE = 120  # seconds, whatever becomes of the test

PROGRAM = """
import signal, sys, torch
signal.alarm(int(sys.argv[2]))
leave, blocks = int(sys.argv[1]), []
torch.zeros(1, device="cuda")
# Pieces, since the memory that is left need not be in one.
piece = 1 << 36
while piece >= 2 << 20:
    free = torch.cuda.mem_get_info()[0]
    if free - piece < leave:
        piece //= 2
        continue
    try:
        blocks.append(torch.empty(piece, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        piece //= 2
print("full", flush=True)
sys.stdin.read()
"""


@contextmanager
def gpu_hog(leave: int) -> Iterator[None]:
    """While it lasts about `leave` bytes of the GPU are free; afterwards all are again."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(leave), str(LIFE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == "full\n", "the GPU could not be filled"
        yield
    finally:
        process.stdin.close()  # it ends
        try:
            process.wait(30)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
