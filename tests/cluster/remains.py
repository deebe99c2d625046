"""Takes away what a run left on this machine, however it ended. `down` and every fresh `up` use it, and tests ask it what is left."""

from __future__ import annotations

import shutil
from pathlib import Path

from cluster import cgroups, layout, network, node
from cluster.errors import ClusterError
from cluster.layout import Node
from cluster.processes import end
from cluster.state import State

MOST_NODES = 9


def remove(found: State | None) -> None:
    """Processes by id, then namespaces and links, cgroups, sysctls, and the folder last: the record lives in it."""
    nodes = _nodes(found)
    if found is not None and found.is_of_this_boot:  # else the ids are strangers'
        _end_processes(found, nodes)
    network.remove(nodes)
    for one in nodes:
        cgroups.remove(one)
    cgroups.remove_top()
    if found is not None:
        _restore(found)
    if _mounts_below(layout.ROOT):
        raise ClusterError(f"something is mounted below {layout.ROOT}: {_mounts_below(layout.ROOT)}; unmount it first")
    if layout.ROOT.exists():
        shutil.rmtree(layout.ROOT)
    if strays := _processes():  # started by a run that was killed before it could record them
        raise ClusterError(f"these name the cluster's folder and no record has them: {strays}; end them by id")


def left() -> list[str]:
    """What of a cluster is on this machine now; empty after `down`."""
    found = network.leftovers(layout.nodes(MOST_NODES))
    if layout.ROOT.exists():
        found.append(f"folder {layout.ROOT}")
    found += [f"mount {mount}" for mount in _mounts_below(layout.ROOT)]
    found += cgroups.leftovers()
    return found + _processes()


def _processes() -> list[str]:
    return [said for entry in Path("/proc").iterdir() if entry.name.isdecimal() for said in _ours(entry)]


def _ours(entry: Path) -> list[str]:
    """The process, if its command line names the cluster's folder."""
    try:
        words = (entry / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
    marked = any(str(layout.ROOT).encode() in word for word in words)
    return [f"process {entry.name}: {words[0].decode(errors='replace')}"] if marked else []


def _nodes(found: State | None) -> list[Node]:
    """Those of the record, and those whose namespace or link a run without a record left."""
    count = found.node_count if found is not None else 0
    return layout.nodes(max(count, MOST_NODES))


def _end_processes(found: State, nodes: list[Node]) -> None:
    for one in nodes:
        node.crash(found, one)
    end([process for name, process in found.processes.items() if not name.startswith("node-")])


def _restore(found: State) -> None:
    """Kernel settings that kubelet changed, and folders that were made to be mounted over."""
    if found.is_of_this_boot:
        for name, value in found.sysctls.items():
            path = Path("/proc/sys", name)
            if path.read_text().strip() != value:
                path.write_text(value)
    for folder in reversed(found.made_folders):
        try:
            Path(folder).rmdir()
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ClusterError(f"{folder} was made empty for the cluster and is in use: {error}") from None


def _mounts_below(folder: Path) -> list[str]:
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [point for point in points if Path(point).is_relative_to(folder)]
