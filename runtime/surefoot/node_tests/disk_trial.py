"""Writes to a folder, syncs, and reads it back.

A disk that takes everything and returns something else is found by no system call, and by a training days later.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

from surefoot.node_tests.host_tests import Trial

_BYTES = 4 << 20


def try_disk(folder: Path) -> Trial:
    """Of a folder that a worker writes to."""
    path = folder / f".surefoot-trial-{os.getpid()}"
    content = os.urandom(1 << 16) * (_BYTES >> 16)
    began = time.monotonic()
    try:
        back = _written_and_read(path, content)
    except OSError as error:
        return _failed(folder, error)
    finally:
        path.unlink(missing_ok=True)
    if back != content:
        text = f"what was written to {folder} is read back otherwise ({len(back)} of {_BYTES} bytes)"
        return Trial("disk", "fails", "DiskFails", text)
    return Trial("disk", "well", rate=1e-6 * _BYTES / max(time.monotonic() - began, 1e-9), unit="MB")


def _written_and_read(path: Path, content: bytes) -> bytes:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else it is read from memory
    return path.read_bytes()


def _failed(folder: Path, error: OSError) -> Trial:
    """Only the disk's own error is the node's; full, read-only or another's may be meant so."""
    text = f"{folder} could not be written to and read back: {error.strerror or error}"
    if error.errno == errno.EIO:
        return Trial("disk", "fails", "DiskFails", text)
    return Trial("disk", "unknown", text=text)
