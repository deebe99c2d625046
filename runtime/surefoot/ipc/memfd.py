"""Allocates one local rank's staging memory as an anonymous shared file.

The agent maps it, touches it once, and hands it to its trainer. It outlives the trainer: what was staged is drained
although its writer is dead. It lies in no file system: neither /dev/shm nor a volume's size limits it, only the
container's memory does, which the agent's `memory` asks before it makes one.
"""

from __future__ import annotations

import ctypes
import mmap
import os

SLOTS = 2
_MADV_POPULATE_READ = 22
_TOUCH_BYTES = 64 << 20
"""Touched at a time: each piece releases the interpreter lock for its time only."""


def map_whole(fd: int, size: int) -> mmap.mmap:
    """Maps the file and fills this process' page table now.

    At the first copy it costs eight times as much. The GIL is free meanwhile. Where the kernel cannot (before 5.14),
    the first copy pays.
    """
    mapping = mmap.mmap(fd, size)
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    advise = ctypes.CDLL(None).madvise
    for offset in range(0, size, _TOUCH_BYTES):
        part = min(_TOUCH_BYTES, size - offset)
        advise(ctypes.c_void_p(start + offset), ctypes.c_size_t(part), _MADV_POPULATE_READ)
    return mapping


class MemoryFile:
    """Maps `SLOTS` slots of `slot_bytes`, shared by descriptor with the trainer.

    OSError if they cannot be mapped.
    """

    def __init__(self, name: str, slot_bytes: int) -> None:
        self.slot_bytes = -(-max(slot_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        size = SLOTS * self.slot_bytes
        self.fd = os.memfd_create(f"surefoot-{name}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, size)
            self._map = mmap.mmap(self.fd, size)
        except OSError:
            os.close(self.fd)
            raise
        self.memory = memoryview(self._map)

    def touch(self) -> None:
        """Touches every page now, so that no save pays for it.

        It blocks for seconds per GB: call it in a thread.
        """
        size = len(self.memory)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for offset in range(0, size, _TOUCH_BYTES):
            ctypes.memset(start + offset, 0, min(_TOUCH_BYTES, size - offset))

    def close(self) -> None:
        """Closes the descriptor; views that somebody holds keep the mapping."""
        os.close(self.fd)
        try:
            self.memory.release()
            self._map.close()
        except BufferError:
            pass  # a reader that was given up still looks at it; the mapping ends with the process
