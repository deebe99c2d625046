"""Defines what an agent finds wrong with its node, and its message.

Pure values. Whoever reads them acts upon `blame` alone: a node is left for what its
hardware did, never for what a program did, nor for what is merely odd.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

Blame = Literal["node", "application", "unknown"]

MOST_FINDINGS = 16
"""In one message: a node with more is as sick with fewer."""

LONGEST_TEXT = 300

TRIED = frozenset({"ComputesWrong", "GpuComputesWrong", "MemoryWrong", "DiskFails", "LoopbackFails", "AllReduceFails"})
"""Reasons of what fails on a node that is tried before a worker there gets a rank."""


@dataclass(frozen=True, slots=True)
class NodeFinding:
    """One fault; `reason` is CamelCase and stable, `text` a sentence.

    `blame`: what the evidence names. unknown: it is told to people, and nothing else follows.
    """

    reason: str
    text: str
    blame: Blame


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """Replaces what an agent found wrong with its node; empty: nothing is.

    Said on every connection, at each change, and every few minutes.
    """

    SINCE: ClassVar[int] = 3
    findings: tuple[NodeFinding, ...] = ()
    clock_seconds: float = 0.0
    """Unix time by the node's own clock."""
    tried: bool = False
    """Nothing was found in the trial that its agent makes alone, and the node can be tried with another one."""
