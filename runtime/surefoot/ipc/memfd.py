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


class StagingMapping:
    """Maps staging memory into a trainer, part by part.

    A page that is met first by a copy costs eight times as much, so both slots are filled before the first save. A
    restore in place waits for the slot that it reads alone: for both it would wait longer than for its reads.
    """

    def __init__(self, fd: int) -> None:
        """OSError if it cannot be mapped."""
        found = os.fstat(fd)
        self.file, self._filled = found.st_ino, list[range]()
        self._map = mmap.mmap(fd, found.st_size)
        self.memory = memoryview(self._map)

    def fill(self, part: range) -> None:
        """Enters these bytes into the page table; the GIL is free meanwhile.

        Where the kernel cannot (before 5.14), the first copy pays.
        """
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        advise = ctypes.CDLL(None).madvise
        first = part.start // mmap.PAGESIZE * mmap.PAGESIZE
        for offset in range(first, part.stop, _TOUCH_BYTES):
            size = min(_TOUCH_BYTES, part.stop - offset)
            advise(ctypes.c_void_p(start + offset), ctypes.c_size_t(size), _MADV_POPULATE_READ)
        self._filled.append(part)

    def fill_rest(self) -> None:
        """Enters all that no `fill` entered."""
        begin = 0
        for part in sorted(self._filled, key=lambda part: part.start):
            if begin < part.start:
                self.fill(range(begin, part.start))
            begin = max(begin, part.stop)
        if begin < len(self.memory):
            self.fill(range(begin, len(self.memory)))


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
