"""Lists the checks that an agent runs of its node.

Used by `agent_process`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from surefoot.agent.health.gpu_checks import GpuCheck
from surefoot.agent.health.kernel_words import KernelWords
from surefoot.agent.health.link_check import LinkCheck
from surefoot.agent.health.memory_pressure import MemoryPressure
from surefoot.agent.health.node_check import NodeCheck
from surefoot.agent.health.node_checks import FolderCheck


def node_checks(folders: Iterable[Path]) -> list[NodeCheck]:
    """Makes one check of each kind; the worker writes to `folders`."""
    return [GpuCheck(), KernelWords(), MemoryPressure(), FolderCheck(folders), LinkCheck()]
