"""The cgroups of nodes: one folder a node in every hierarchy, under which its kubelet keeps those of its pods."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from cluster.errors import ClusterError
from cluster.layout import Node
from cluster.processes import wait

TOP = "surefoot-cluster"
MOUNT = Path("/sys/fs/cgroup")
WEIGHT = 16
"""Pods of all nodes together against one process of the host: as one, they would starve beside whatever else runs here."""

_ONE = {"cpu.shares": 1024, "cpu.weight": 100}


def of_node(node: Node) -> str:
    """As kubelet wants it named."""
    return f"/{TOP}/{node.name}"


def make(node: Node) -> None:
    """In every hierarchy: kubelet wants its root to be there."""
    make_heavy(TOP)
    for hierarchy in _hierarchies():
        (hierarchy / TOP / node.name).mkdir(exist_ok=True)


def make_heavy(top: str) -> None:
    """A folder in every hierarchy whose processes together weigh as several of the host."""
    for hierarchy in _hierarchies():
        (hierarchy / top).mkdir(exist_ok=True)
        for name, one in _ONE.items():  # cgroup v1 and v2
            file = hierarchy / top / name
            if file.exists():
                file.write_text(str(WEIGHT * one))


def enter(folder: str, process: int) -> None:
    """A process, with the children that it will have, where folders have a weight; made if need be."""
    for hierarchy in _hierarchies():
        if any((hierarchy / folder).parent.joinpath(name).exists() for name in _ONE):
            (hierarchy / folder).mkdir(exist_ok=True)
            (hierarchy / folder / "cgroup.procs").write_text(str(process))


def remove(node: Node) -> None:
    """Its cgroups, deepest first; nobody may live in them any more."""
    remove_tree(f"{TOP}/{node.name}")


def remove_tree(top: str) -> None:
    """A folder of every hierarchy, with all below it."""
    for hierarchy in _hierarchies():
        for folder, _, _ in os.walk(hierarchy / top, topdown=False):
            if not wait(partial(_is_removed, folder), 5.0):
                raise ClusterError(f"cgroup {folder} is still in use; see its cgroup.procs")


def _is_removed(folder: str) -> bool:
    try:
        os.rmdir(folder)
    except OSError:
        return False  # a process that was killed is not wholly gone yet
    return True


def remove_top() -> None:
    """The folder that held every node's; left alone while a node's is in it."""
    for hierarchy in _hierarchies():
        top = hierarchy / TOP
        if top.is_dir() and not any(entry.is_dir() for entry in top.iterdir()):
            top.rmdir()


def _hierarchies() -> list[Path]:
    """One folder for cgroup v2; one for each controller for v1."""
    if (MOUNT / "cgroup.controllers").exists():
        return [MOUNT]
    return sorted(
        folder for folder in MOUNT.iterdir() if (folder / "cgroup.procs").exists() and not folder.is_symlink()
    )


def leftovers() -> list[str]:
    """Those that are there now."""
    return [f"cgroup {hierarchy / TOP}" for hierarchy in _hierarchies() if (hierarchy / TOP).exists()]
