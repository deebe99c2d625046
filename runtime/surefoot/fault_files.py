"""Finds the faults that `surefoot local` requests from a process.

Some faults cannot be injected from outside, so the process injects them itself when a file with the fault's kind and the
node's name exists. On a cluster the folder is not set. Standard library only, since node tests must start fast.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def fault_file(kind: str, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the path of the file that requests this fault on this node; None outside of `surefoot local`."""
    folder, node = environment.get("SUREFOOT_INJECTED_FAULTS_FOLDER"), environment.get("SUREFOOT_NODE")
    return Path(folder, f"{kind}-{node}") if folder and node else None


def is_fault_requested(kind: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this node's processes are requested to inject this fault now."""
    path = fault_file(kind, environment)
    return path is not None and path.exists()


def consume_fault(path: Path | None) -> str | None:
    """Removes a fault's file and returns its text; None: there is none, or another process of this node took it."""
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
