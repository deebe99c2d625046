"""Opens Unix sockets at paths longer than the kernel's 107 bytes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

LONGEST = 100


@contextlib.contextmanager
def reachable(path: Path) -> Iterator[str]:
    """Yields a name of the socket short enough to bind or connect."""
    if len(os.fsencode(path)) <= LONGEST:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
