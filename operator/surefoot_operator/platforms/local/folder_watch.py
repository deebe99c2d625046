"""Reports file changes in folders through inotify.

Linux and standard library only. Called by `platform` (in its event loop) and `node_process` (in poll).
"""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

_IN_NONBLOCK, _IN_CLOEXEC = 0o4000, 0o2000000
# a rename into place, a removal, a link: every way in which `run_folder` changes a file
_IN_MOVED_TO, _IN_CREATE, _IN_DELETE = 0x80, 0x100, 0x200
_EVENT = struct.Struct("iIII")
_libc = ctypes.CDLL(None, use_errno=True)


class FolderWatch:
    """A descriptor that is readable after entries were renamed, created or removed."""

    def __init__(self, folders: list[Path]) -> None:
        self.descriptor = _libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC)
        if self.descriptor < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1 failed: too many watches on this machine?")
        for folder in folders:
            mask = _IN_MOVED_TO | _IN_CREATE | _IN_DELETE
            if _libc.inotify_add_watch(self.descriptor, os.fsencode(folder), mask) < 0:
                number = ctypes.get_errno()
                os.close(self.descriptor)
                raise OSError(number, f"inotify_add_watch on {folder} failed")

    def read(self) -> set[str]:
        """Names that changed since the last call, without scratch files.

        "*" after an overflow of the kernel's queue: anything may have changed.
        """
        names: set[str] = set()
        while True:
            try:
                content = os.read(self.descriptor, 65536)
            except BlockingIOError:
                return names
            at = 0
            while at < len(content):
                watch, _, _, length = _EVENT.unpack_from(content, at)
                at += _EVENT.size
                name = "*" if watch < 0 else os.fsdecode(content[at : at + length].rstrip(b"\0"))
                if not name.startswith("."):
                    names.add(name)
                at += length

    def close(self) -> None:
        os.close(self.descriptor)
