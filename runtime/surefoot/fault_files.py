"""Finds what `surefoot local` tells a process to do to itself.

Standard library only, as trials of nodes begin in a moment. What nothing outside of a process can do to it, the process does
itself where it is told: by a file of the fault's kind and the node's name. On a cluster nobody sets the folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def fault_file(kind: str, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Where this node's processes look for it; None outside of `surefoot local`."""
    folder, node = environment.get("SUREFOOT_INJECTED_FAULTS_FOLDER"), environment.get("SUREFOOT_NODE")
    return Path(folder, f"{kind}-{node}") if folder and node else None


def is_fault_requested(kind: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this node's processes shall do it now."""
    path = fault_file(kind, environment)
    return path is not None and path.exists()


def consume_fault(path: Path | None) -> str | None:
    """Takes the word away and returns what it says.

    None: there is none, or another process of this node was faster.
    """
    if path is None or not path.exists():
        return None
    consumed_path = path.with_name(f"{path.name}.taken-{os.getpid()}")
    try:
        os.rename(path, consumed_path)
    except FileNotFoundError:
        return None
    text = consumed_path.read_text(encoding="utf-8")
    consumed_path.unlink()
    return text
