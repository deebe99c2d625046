"""Who lives on a node: found by its PID namespace, so that whatever was forked meanwhile is found too; signalled by id."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import ClusterError
from cluster.layout import Node
from cluster.processes import Recorded, end, start_time
from cluster.state import State

TASKS = "run/containerd/io.containerd.runtime.v2.task/k8s.io"


@dataclass(frozen=True)
class Resident:
    """A process on a node: its id here, its id in its own innermost PID namespace, and its program."""

    pid: int
    own_pid: int
    program: str
    is_in_container: bool


def find(state: State, node: Node, program: str) -> Resident | None:
    """The node's daemon of that name."""
    for resident in residents(state, node):
        if Path(resident.program).name == program and not resident.is_in_container:
            return resident
    return None


def residents(state: State, node: Node) -> list[Resident]:
    """Everything that runs on the node: who shares its PID namespace, and their descendants in namespaces below."""
    if not state.is_alive(node.name):
        return []
    init = state.processes[node.name].pid
    try:
        namespace = os.readlink(f"/proc/{init}/ns/pid")
    except OSError:
        return []
    parents: dict[int, int] = {}
    direct: set[int] = set()
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            parents[int(entry)] = int(Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1])
            if os.readlink(f"/proc/{entry}/ns/pid") == namespace:
                direct.add(int(entry))
        except OSError:
            continue  # ended while we looked
    inside = set(direct)
    grown = True
    while grown:
        below = {pid for pid, parent in parents.items() if parent in inside and pid not in inside}
        inside |= below
        grown = bool(below)
    found = [_resident(pid, pid not in direct) for pid in sorted(inside)]
    return [resident for resident in found if resident is not None]


def _resident(pid: int, is_in_container: bool) -> Resident | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    own = next(line.split()[-1] for line in lines if line.startswith("NSpid:"))
    return Resident(pid, int(own), program_of(pid), is_in_container)


def stop(state: State, node: Node) -> None:
    """SIGSTOP to everything on it; looks again until nobody was forked meanwhile."""
    _signal_all(state, node, signal.SIGSTOP)


def go_on(state: State, node: Node) -> None:
    """SIGCONT to everything on it: it goes on with an old idea of the world."""
    _signal_all(state, node, signal.SIGCONT)


def _signal_all(state: State, node: Node, number: signal.Signals) -> None:
    reached: set[int] = set()
    while fresh := [resident.pid for resident in residents(state, node) if resident.pid not in reached]:
        for pid in fresh:
            reached.add(pid)
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass  # ended by itself


def kill_program(state: State, node: Node, program: str) -> None:
    """SIGKILL to one of the node's daemons."""
    resident = find(state, node, program)
    if resident is None:
        raise ClusterError(f"{program} does not run on {node.name}")
    started = start_time(resident.pid)
    if started is not None:
        end([Recorded(resident.pid, started)])


def kill_container(state: State, node: Node, container: str) -> None:
    """SIGKILL to the container's first process."""
    file = root(state, node) / TASKS / container / "init.pid"
    try:
        on_node = int(file.read_text())
    except (OSError, ValueError):
        raise ClusterError(f"container {container} does not run on {node.name}") from None
    for resident in residents(state, node):
        if resident.is_in_container and _pid_on_node(resident.pid, state, node) == on_node:
            os.kill(resident.pid, signal.SIGKILL)
            return
    raise ClusterError(f"process {on_node} of container {container} is gone from {node.name}")


def _pid_on_node(pid: int, state: State, node: Node) -> int | None:
    """The process's id in the node's PID namespace."""
    depth = len(_own_pids(state.processes[node.name].pid))
    ids = _own_pids(pid)
    return ids[depth - 1] if len(ids) >= depth else None


def _own_pids(pid: int) -> list[int]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return []
    return [int(text) for line in lines if line.startswith("NSpid:") for text in line.split()[1:]]


def root(state: State, node: Node) -> Path:
    """The node's file system as seen from here."""
    return Path(f"/proc/{state.processes[node.name].pid}/root")


def program_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    except OSError:
        return ""
