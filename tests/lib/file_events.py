"""What a process does to the files of some folders, as the kernel's inotify tells it."""

import ctypes
import os
import struct
from pathlib import Path

_OPEN, _ACCESS, _MODIFY, _CREATE, _DELETE = 0x20, 0x1, 0x2, 0x100, 0x200
_IS_DIR = 0x40000000
_EVENT = struct.Struct("iIII")


class FileEvents:
    """Watches folders (not their subfolders); forget() and take() drain what has happened."""

    def __init__(self, *folders: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._fd >= 0, os.strerror(ctypes.get_errno())
        self._folders = {}
        for folder in folders:
            mask = _OPEN | _ACCESS | _MODIFY | _CREATE | _DELETE
            watch = libc.inotify_add_watch(self._fd, os.fsencode(folder), mask)
            assert watch >= 0, os.strerror(ctypes.get_errno())
            self._folders[watch] = folder

    def __enter__(self) -> "FileEvents":
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._fd)

    def take(self) -> set[Path]:
        """The files that were opened, read, written, made or removed since the last call."""
        touched = set()
        while True:
            try:
                data = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                return touched
            while data:
                watch, mask, _, length = _EVENT.unpack_from(data)
                name = data[_EVENT.size : _EVENT.size + length].rstrip(b"\0")
                data = data[_EVENT.size + length :]
                if not mask & _IS_DIR or mask & (_CREATE | _DELETE):
                    touched.add(self._folders[watch] / os.fsdecode(name))
