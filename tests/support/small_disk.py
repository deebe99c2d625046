"""A small file system that can be filled to the last byte; root alone may mount one."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def small_disk(folder: Path, size: str = "4m") -> Iterator[Path]:
    """Mounts a tmpfs on the folder for as long as the block lasts."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "surefoot-test", str(folder)]
    subprocess.run(mount, check=True, capture_output=True, timeout=10)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, capture_output=True, timeout=10)


def fill(path: Path) -> None:
    """Writes one file until its file system has no space left."""
    for size in (1 << 16, 1):  # the last page too: what is renamed into place is small
        with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(size))
