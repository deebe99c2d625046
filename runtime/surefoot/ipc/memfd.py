"""Allocates one local rank's staging memory as an anonymous shared file (memfd).

The agent maps and prefaults it and passes it to its trainer. It outlives the trainer, so a staged save is flushed even
if its writer is dead. It is in no file system: only the container's memory limits it, not the size of /dev/shm or of a
volume. The agent checks that limit before it allocates.
"""

from __future__ import annotations

import ctypes
import mmap
import os

SLOTS = 2
"""Slots per rank, written in turn, so that the last complete save stays until the next one is complete."""
_MADV_POPULATE_READ = 22
"""Value of madvise(2) from Linux 5.14 on, which Python's mmap does not define."""
_TOUCH_BYTES = 64 << 20
"""Bytes per call, so that no call blocks for long."""


class StagingMapping:
    """Maps staging memory into a trainer, part by part.

    Copying to a page that is not mapped yet costs eight times as much, so both slots are prefaulted before the first
    save. A restore in place prefaults only the slot that it reads: both would take longer than its reads.
    """

    def __init__(self, fd: int) -> None:
        """Maps the file; raises OSError if that fails."""
        file_status = os.fstat(fd)
        self.inode, self._filled = file_status.st_ino, list[range]()
        self._map = mmap.mmap(fd, file_status.st_size)
        self.memory = memoryview(self._map)

    def prefault(self, part: range) -> None:
        """Enters these bytes into the page table; the GIL is released.

        Before Linux 5.14 it does nothing, and the first copy is slower.
        """
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        advise = ctypes.CDLL(None).madvise
        first_page = part.start // mmap.PAGESIZE * mmap.PAGESIZE
        for offset in range(first_page, part.stop, _TOUCH_BYTES):
            size = min(_TOUCH_BYTES, part.stop - offset)
            advise(ctypes.c_void_p(address + offset), ctypes.c_size_t(size), _MADV_POPULATE_READ)
        self._filled.append(part)

    def prefault_rest(self) -> None:
        """Prefaults all bytes that `fill` has not covered."""
        gap_start = 0
        for part in sorted(self._filled, key=lambda part: part.start):
            if gap_start < part.start:
                self.prefault(range(gap_start, part.start))
            gap_start = max(gap_start, part.stop)
        if gap_start < len(self.memory):
            self.prefault(range(gap_start, len(self.memory)))


class MemoryFile:
    """Staging memory of one rank: `SLOTS` slots, shared with the trainer by its descriptor.

    Raises:
        OSError: It cannot be mapped.
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

    def prefault(self) -> None:
        """Touches every page now, so that no save is slowed down by it.

        Blocks for seconds per GB: call it in a thread.
        """
        size = len(self.memory)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for offset in range(0, size, _TOUCH_BYTES):
            ctypes.memset(address + offset, 0, min(_TOUCH_BYTES, size - offset))

    def close(self) -> None:
        """Closes the descriptor; the memory stays mapped while views of it exist."""
        os.close(self.fd)
        try:
            self.memory.release()
            self._map.close()
        except BufferError:
            pass  # a reader that was abandoned still has a view; the mapping ends with the process
