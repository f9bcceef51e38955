"""Opens files that callers name, below folders that the operator allows."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path


def open_below(root: Path, path: Path) -> int:
    """Opens a regular file below a root, which has no links itself. The path may change at any
    time: no link is followed from the root on. Blocks on the disk.

    Raises PermissionError for a path that leads, links resolved, out of the root, and
    FileNotFoundError for what is no file that this process can read.
    """
    try:
        real = Path(os.path.realpath(path, strict=True))
    except (OSError, ValueError):
        raise FileNotFoundError(path) from None
    if not real.is_relative_to(root):
        raise PermissionError(path)
    *folders, name = real.relative_to(root).parts or (".",)
    with contextlib.ExitStack() as stack:
        try:
            at = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, at)
            for folder in folders:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                at = os.open(folder, flags, dir_fd=at)
                stack.callback(os.close, at)
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(name, flags, dir_fd=at)
        except OSError:
            raise FileNotFoundError(path) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(path)
    return descriptor
