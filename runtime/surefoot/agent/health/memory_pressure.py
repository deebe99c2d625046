"""Reads the kernel's pressure stall information of the node's memory.

Run by `node_monitor` in a thread. Memory that many programs wait for makes steps slow long before anything is killed; whose
fault it is, the figure does not say.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from surefoot.protocol.node_findings import NodeFinding

MOST_PERCENT = 20.0
"""Of the last minute in which every program waited for memory."""


class MemoryPressure:
    """Finds a node whose programs wait for memory."""

    name = "memory"
    period_seconds = 10.0

    def __init__(self, path: Path = Path("/proc/pressure/memory")) -> None:
        self._path = path

    def find(self) -> Sequence[NodeFinding]:
        try:
            lines = self._path.read_text().splitlines()
        except OSError:
            return ()  # a kernel without it
        full = next((line for line in lines if line.startswith("full ")), "")
        figures = dict(part.partition("=")[::2] for part in full.split()[1:])
        percent = float(figures.get("avg60", "0"))
        if percent < MOST_PERCENT:
            return ()
        text = f"all programs of this node waited for memory in {percent:g} % of the last minute"
        return (NodeFinding("MemoryPressure", text, "unknown"),)
