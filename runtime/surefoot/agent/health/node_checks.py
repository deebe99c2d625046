"""Checks that a worker's folders can be written to.

Run by `node_monitor` in a thread. Full disks and file systems that the kernel made read-only end logs, ledgers and scripts
in ways that look like a program's own error.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from surefoot.fault_files import is_told
from surefoot.protocol.node_findings import Blame, NodeFinding
from surefoot.protocol.text import amount

LEAST_BYTES = 64 << 20
LEAST_SHARE = 0.01


class FolderCheck:
    """Finds folders that are full, read-only or fail."""

    name = "disk"
    period_seconds = 10.0

    def __init__(self, folders: Iterable[Path], environment: Mapping[str, str] = os.environ) -> None:
        self._folders = tuple(dict.fromkeys(folders))
        self._environment = environment
        self._written: set[Path] = set()

    def find(self) -> Sequence[NodeFinding]:
        return [found for folder in self._folders if (found := self._of(folder)) is not None]

    def _of(self, folder: Path) -> NodeFinding | None:
        probe = folder / f".surefoot-probe-{os.getpid()}"
        try:
            if is_told("diskfull", self._environment):  # the machine's own disk is never filled for it
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            probe.write_bytes(b"surefoot")
            self._written.add(folder)
            probe.unlink()
            return self._filling(folder)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return NodeFinding("DiskFull", f"{folder} is full", "unknown")
            if error.errno == errno.EIO:
                return NodeFinding("DiskFails", f"{folder} cannot be written to: {error}", "node")
            if error.errno == errno.EROFS:
                # one that never could be written to was mounted so by somebody
                blame: Blame = "node" if folder in self._written else "unknown"
                return NodeFinding("FilesystemReadOnly", f"{folder} has become read-only", blame)
            return None  # not ours to write to: whoever needs it says so

    def _filling(self, folder: Path) -> NodeFinding | None:
        space = os.statvfs(folder)
        free, size = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
        if free >= min(LEAST_BYTES, LEAST_SHARE * size):
            return None
        return NodeFinding("DiskFull", f"{folder} has {amount(free)} of {amount(size)} left", "unknown")
