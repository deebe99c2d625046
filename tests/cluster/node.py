"""One node: a PID, mount, UTS and network namespace with containerd, kubelet and kube-proxy in it.

Its first process is recorded by id and start time. Killing that one makes the kernel kill everything on the node at once, and with
the last of them its mounts and its memory go: what a crash of a machine does.
"""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from cluster import binaries, cgroups, layout, network, node_files, residents
from cluster.errors import ClusterError
from cluster.layout import Node
from cluster.processes import NICENESS, Recorded, end, run, spawn, start_time, wait
from cluster.state import State

SOCKET = "run/containerd/containerd.sock"


def boot(state: State, node: Node) -> None:
    """Namespaces and containerd; kubelet and kube-proxy come with `start`."""
    if state.is_alive(node.name):
        return
    cgroups.make(node)
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
            if started is not None and residents.program_of(int(text)) == str(node.folder / "init"):
                found.append(Recorded(int(text), started))
        return bool(found) or start_time(outer.pid) is None

    if not wait(is_up, 15.0) or not found:
        raise ClusterError(f"{node.name} did not come up; read {_log(node, 'init')}")
    return found[0]


def start_containerd(state: State, node: Node) -> None:
    """Starts it unless it runs, and waits for its socket."""
    ensure(state, node, "containerd", ["containerd", "--config", str(node.folder / "containerd.toml")])
    socket = residents.root(state, node) / SOCKET
    if not wait(lambda: socket.exists() and _answers(socket), 30.0):
        raise ClusterError(f"containerd of {node.name} does not answer; read {_log(node, 'containerd')}")


def import_images(state: State, node: Node, archives: list[Path]) -> None:
    """Puts the images into its containerd."""
    for archive in archives:
        socket = str(residents.root(state, node) / SOCKET)
        command = ("ctr", "-a", socket, "-n", "k8s.io", "images", "import", "--snapshotter", "native", str(archive))
        run(*command, seconds=60)


def start_services(state: State, node: Node) -> None:
    """kubelet and kube-proxy, unless they run."""
    programs = binaries.kubernetes_folder()
    ensure(state, node, "kubelet", node_files.kubelet_command(node, programs / "kubelet"))
    ensure(state, node, "kube-proxy", node_files.proxy_command(node, programs / "kube-proxy"))


def ensure(state: State, node: Node, program: str, command: list[str]) -> None:
    """Starts a daemon on the node unless one of that program runs there; it is the child of the node's init."""
    if residents.find(state, node, program) is not None:
        return
    line = f"nice -n {NICENESS} {shlex.join(command)} >>{_log(node, program)} 2>&1 </dev/null &"
    init = state.processes[node.name].pid
    run("nsenter", f"--target={init}", "--mount", "--pid", "--uts", "--net", "setsid", "sh", "-c", line)


def crash(state: State, node: Node) -> None:
    """SIGKILL to everything on it at once."""
    end([state.processes[name] for name in (node.name, f"{node.name}-outer") if name in state.processes])


def is_frozen(state: State, node: Node) -> bool:
    """Whether its first process is stopped."""
    try:
        stat = Path(f"/proc/{state.processes[node.name].pid}/stat").read_text()
    except (OSError, KeyError):
        return False
    return stat.rpartition(")")[2].split()[0] == "T"


def _answers(socket: Path) -> bool:
    return run("ctr", "-a", str(socket), "--connect-timeout", "1s", "version", check=False).count("Version") > 1


def _log(node: Node, program: str) -> Path:
    return layout.LOGS / f"{node.name}-{program}.log"
