"""Finds faults of the node in new lines of the kernel's log.

Run by `node_monitor` in a thread. The log is the whole node's: what it says of a disk or a GPU is the node's, what it says
of a program may be another pod's, and blames nobody.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from surefoot.agent.health.kernel_log import KernelLog
from surefoot.agent.health.xid_table import xid_finding
from surefoot.protocol.node_findings import NodeFinding

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)")
_MOST_KEPT = 16


class KernelWords:
    """Keeps what the kernel said since this agent began."""

    name = "kernel"
    period_seconds = 5.0

    def __init__(self, log: KernelLog | None = None) -> None:
        self._log = log if log is not None else KernelLog()
        self._found: dict[str, NodeFinding] = {}

    def find(self) -> Sequence[NodeFinding]:
        for line in self._log.lines():
            found = kernel_finding(line)
            if found is not None and (found.reason in self._found or len(self._found) < _MOST_KEPT):
                self._found[found.reason] = found
        return tuple(self._found.values())


def kernel_finding(line: str) -> NodeFinding | None:
    """Reads one line of the kernel's log; None: it says nothing."""
    xid = _XID.search(line)
    if xid is not None:
        return xid_finding(int(xid.group(2)), f"the GPU at {xid.group(1)}")
    lower = line.lower()
    if "remounting filesystem read-only" in lower:
        return NodeFinding("FilesystemReadOnly", f"the kernel made a file system read-only: {line}", "node")
    if "i/o error, dev " in lower:
        return NodeFinding("DiskErrors", f"the kernel could not read or write a disk: {line}", "unknown")
    if "mce: [hardware error]" in lower or "machine check" in lower:
        return NodeFinding("MachineCheck", f"the processor reported a hardware error: {line}", "unknown")
    return None
