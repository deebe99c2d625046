"""One node: a PID, mount, UTS and network namespace with containerd, kubelet and kube-proxy in it.

Its first process is recorded by id and start time. Killing that one makes the kernel kill everything on the node at once, and with
the last of them its mounts and its memory go: what a crash of a machine does.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cluster import binaries, layout, network, node_files
from cluster.errors import ClusterError
from cluster.layout import Node
from cluster.processes import NICENESS, Recorded, end, run, spawn, start_time, wait
from cluster.state import State

SOCKET = "run/containerd/containerd.sock"
TASKS = "run/containerd/io.containerd.runtime.v2.task/k8s.io"
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Resident:
    """A process on a node: its id here, its id in its own innermost PID namespace, and its program."""

    pid: int
    own_pid: int
    program: str
    is_in_container: bool


def boot(state: State, node: Node) -> None:
    """Namespaces and containerd; kubelet and kube-proxy come with `start`."""
    if state.is_alive(node.name):
        return
    for hierarchy in _hierarchies():
        (hierarchy / node_files.cgroup(node).strip("/")).mkdir(parents=True, exist_ok=True)
    init = node.folder / "init"
    if not init.exists():
        shutil.copy2(binaries.pause(), init)
    command = ["nsenter", f"--net={network.NAMESPACES / node.namespace}", "unshare", "--mount", "--pid", "--uts"]
    command += ["--fork", "--kill-child=SIGKILL", "--mount-proc", "sh", str(node.folder / "init.sh")]
    outer = spawn(command, _log(node, "init"))
    state.record(f"{node.name}-outer", outer)
    state.record(node.name, _inner(outer, node))


def _inner(outer: Recorded, node: Node) -> Recorded:
    """The child of `unshare`: process 1 of the node, once it has laid its mounts and become the init program."""
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
    found: list[Recorded] = []

    def is_up() -> bool:
        for text in children.read_text().split() if children.exists() else ():
            started = start_time(int(text))
            if started is not None and _program(int(text)) == str(node.folder / "init"):
                found.append(Recorded(int(text), started))
        return bool(found) or start_time(outer.pid) is None

    if not wait(is_up, 15.0) or not found:
        raise ClusterError(f"{node.name} did not come up; read {_log(node, 'init')}")
    return found[0]


def start_containerd(state: State, node: Node) -> None:
    """Starts it unless it runs, and waits for its socket."""
    ensure(state, node, "containerd", ["containerd", "--config", str(node.folder / "containerd.toml")])
    socket = root(state, node) / SOCKET
    if not wait(lambda: socket.exists() and _answers(socket), 30.0):
        raise ClusterError(f"containerd of {node.name} does not answer; read {_log(node, 'containerd')}")


def import_images(state: State, node: Node, archives: list[Path]) -> None:
    """Puts the images into its containerd."""
    for archive in archives:
        socket = str(root(state, node) / SOCKET)
        command = ("ctr", "-a", socket, "-n", "k8s.io", "images", "import", "--snapshotter", "native", str(archive))
        run(*command, seconds=60)


def start_services(state: State, node: Node) -> None:
    """kubelet and kube-proxy, unless they run."""
    programs = binaries.kubernetes_folder()
    ensure(state, node, "kubelet", node_files.kubelet_command(node, programs / "kubelet"))
    ensure(state, node, "kube-proxy", node_files.proxy_command(node, programs / "kube-proxy"))


def ensure(state: State, node: Node, program: str, command: list[str]) -> None:
    """Starts a daemon on the node unless one of that program runs there; it is the child of the node's init."""
    if find(state, node, program) is not None:
        return
    line = f"nice -n {NICENESS} {shlex.join(command)} >>{_log(node, program)} 2>&1 </dev/null &"
    init = state.processes[node.name].pid
    run("nsenter", f"--target={init}", "--mount", "--pid", "--uts", "--net", "setsid", "sh", "-c", line)


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
    return Resident(pid, int(own), _program(pid), is_in_container)


def crash(state: State, node: Node) -> None:
    """SIGKILL to everything on it at once."""
    end([state.processes[name] for name in (node.name, f"{node.name}-outer") if name in state.processes])


def freeze(state: State, node: Node) -> None:
    """SIGSTOP to everything on it; looks again until nobody was forked meanwhile."""
    _signal_all(state, node, signal.SIGSTOP)


def thaw(state: State, node: Node) -> None:
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


def is_frozen(state: State, node: Node) -> bool:
    """Whether its first process is stopped."""
    try:
        stat = Path(f"/proc/{state.processes[node.name].pid}/stat").read_text()
    except (OSError, KeyError):
        return False
    return stat.rpartition(")")[2].split()[0] == "T"


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


def remove_cgroups(node: Node) -> None:
    """Its cgroups, deepest first; nobody may live in them any more."""
    for hierarchy in _hierarchies():
        top = hierarchy / node_files.cgroup(node).strip("/")
        for folder, _, _ in os.walk(top, topdown=False):
            if not wait(partial(_is_removed, folder), 5.0):
                raise ClusterError(f"cgroup {folder} is still in use; see its cgroup.procs")


def _is_removed(folder: str) -> bool:
    try:
        os.rmdir(folder)
    except OSError:
        return False  # a process that was killed is not wholly gone yet
    return True


def remove_cgroup_root() -> None:
    """The folder that held every node's; left alone while a node's is in it."""
    for hierarchy in _hierarchies():
        top = hierarchy / node_files.CGROUP_ROOT.strip("/")
        if top.is_dir() and not any(entry.is_dir() for entry in top.iterdir()):
            top.rmdir()


def _hierarchies() -> list[Path]:
    """One folder for cgroup v2; one for each controller for v1."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    return sorted(
        folder for folder in CGROUPS.iterdir() if (folder / "cgroup.procs").exists() and not folder.is_symlink()
    )


def root(state: State, node: Node) -> Path:
    """The node's file system as seen from here."""
    return Path(f"/proc/{state.processes[node.name].pid}/root")


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    except OSError:
        return ""


def _answers(socket: Path) -> bool:
    return run("ctr", "-a", str(socket), "--connect-timeout", "1s", "version", check=False).count("Version") > 1


def _log(node: Node, program: str) -> Path:
    return layout.LOGS / f"{node.name}-{program}.log"
