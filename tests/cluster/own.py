"""The cluster without docker: puts network, daemons and nodes together, hurts them, repairs them, takes them away.

Every verb reads the record that `up` wrote, acts under the lock, and leaves the record true.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

from cluster import (
    binaries,
    cgroups,
    credentials,
    daemons,
    images,
    layout,
    network,
    node,
    node_files,
    packages,
    remains,
    residents,
    state,
)
from cluster.api import Api
from cluster.engine import READY_SECONDS, Facts, NodeStatus, Status
from cluster.errors import ClusterError
from cluster.layout import Node
from cluster.processes import wait
from cluster.state import State
from support.servers import s3_server

NAME = "namespaces"


class OwnCluster:
    """Implements Engine with network, PID and mount namespaces of this machine."""

    def up(self, count: int) -> None:
        """A whole cluster: made, or what is missing of it repaired."""
        if os.geteuid() != 0:
            raise ClusterError("network namespaces and mounts need root; run this as root, or where docker answers")
        if not 1 <= count <= remains.MOST_NODES:
            raise ClusterError(f"a cluster has 1 to {remains.MOST_NODES} nodes, not {count}")
        packages.ensure()
        build_programs()
        with state.locked():
            found = state.load()
            if found is not None and found.is_complete and found.is_of_this_boot and found.node_count == count:
                _repair(found)
                return
            remains.remove(found)
            _make(state.fresh(NAME, count))

    def down(self) -> None:
        """Nothing is left of it."""
        with state.locked():
            remains.remove(state.load())

    def status(self) -> Status:
        """Looks at the processes, the links and the API server."""
        found = state.required()
        api = Api(layout.KUBECONFIG) if credentials.CERTIFICATE.exists() else None
        ready = api.ready_nodes() if api is not None else {}
        nodes = [_node_status(found, one, ready.get(one.name, False)) for one in layout.nodes(found.node_count)]
        running = {name: found.is_alive(name) for name in daemons.DAEMONS}
        return Status(NAME, api is not None and api.answers(), nodes, running)

    def facts(self) -> Facts:
        """Where everything is."""
        found = state.required()
        programs = [binaries.kubernetes_folder(), binaries.helm().parent]
        names = [one.name for one in layout.nodes(found.node_count)]
        return Facts(layout.KUBECONFIG, programs, daemons.s3_url(), names, "")

    def crash(self, name: str, silently: bool = False) -> None:
        """SIGKILL to all of the node at once; silently: its link goes first, so that no peer hears its connections close."""
        with state.locked():
            found, target = _target(name)
            if silently:
                network.cut(target)
            node.crash(found, target)

    def return_node(self, name: str) -> None:
        """Whatever was done to the node is undone; a crashed one boots with its disk and without its memory."""
        with state.locked():
            found, target = _target(name)
            began = datetime.now(UTC)
            _boot_again(found, target)
            node.start_services(found, target)
        Api(layout.KUBECONFIG).wait_ready([name], READY_SECONDS, since=began)

    def freeze(self, name: str) -> None:
        """SIGSTOP to all of the node."""
        with state.locked():
            residents.stop(*_target(name))

    def thaw(self, name: str) -> None:
        """SIGCONT to all of the node."""
        with state.locked():
            residents.go_on(*_target(name))

    def partition(self, name: str) -> None:
        """Its link goes down; everything on it goes on running."""
        with state.locked():
            network.cut(_target(name)[1])

    def heal(self, name: str) -> None:
        """Its link comes up."""
        with state.locked():
            network.join(_target(name)[1])

    def stop_kubelet(self, name: str) -> None:
        """SIGKILL to kubelet; containers live on. `return_node` starts it again."""
        with state.locked():
            found, target = _target(name)
            residents.kill_program(found, target, "kubelet")

    def kill_container(self, namespace: str, pod: str, container: str | None = None) -> None:
        """SIGKILL to the first process of a pod's container."""
        found = state.required()
        body = Api(layout.KUBECONFIG).call("GET", f"/api/v1/namespaces/{namespace}/pods/{pod}")
        name, identity = running_container(body, container)
        target = next(one for one in layout.nodes(found.node_count) if one.name == name)
        residents.kill_container(found, target, identity)

    def kill_daemon(self, name: str) -> None:
        """SIGKILL to etcd, the API server, the S3 server…"""
        with state.locked():
            daemons.kill(state.required(), name)

    def start_daemon(self, name: str) -> None:
        """Starts it again, with the data it had."""
        with state.locked():
            found = state.required()
            daemons.start(found, name)
        if name == "kube-apiserver":
            daemons.wait_api(found)


def running_container(pod: dict[str, object], container: str | None) -> tuple[str, str]:
    """The pod's node and the id of its container, the first unless one is named."""
    spec, status = pod["spec"], pod["status"]
    assert isinstance(spec, dict)
    assert isinstance(status, dict)
    wanted = container or spec["containers"][0]["name"]
    for one in status.get("containerStatuses", []):
        if one["name"] == wanted and "running" in one["state"]:
            return spec["nodeName"], one["containerID"].partition("://")[2]
    raise ClusterError(f"no container {wanted} of that pod runs; its phase is {status.get('phase')}")


def build_programs() -> None:
    """All that is missing, into the user's cache; minutes at the first time, no root needed."""
    binaries.kubernetes_folder()
    binaries.coredns()
    binaries.helm()
    binaries.pause()
    # built within the test that needs it, its minutes would count against the test's deadline
    binaries.gang_scheduler()
    if s3_server.versitygw() is None:
        raise ClusterError("the cluster's S3 server is versitygw, built with Go: install Go 1.25 or newer")


def _make(fresh: State) -> None:
    nodes = layout.nodes(fresh.node_count)
    fresh.save()
    for folder in (layout.LOGS, layout.RUNS, *(one.folder for one in nodes)):
        folder.mkdir(parents=True, exist_ok=True)
    layout.RUNS.chmod(0o1777)  # pods write there under any user id
    _make_mount_points(fresh)
    network.make(nodes)
    credentials.write(nodes)
    daemons.start(fresh, "etcd")
    daemons.start(fresh, "kube-apiserver")
    archives = images.write_archives(layout.ROOT / "images")
    for one in nodes:  # while the API server comes up
        node_files.write(one)
        node.boot(fresh, one)
        node.start_containerd(fresh, one)
    for one in nodes:
        node.import_images(fresh, one, archives)
    _finish(fresh)
    fresh.is_complete = True
    fresh.save()


def _repair(found: State) -> None:
    daemons.start(found, "etcd")
    daemons.start(found, "kube-apiserver")
    hurt = [one for one in layout.nodes(found.node_count) if not _node_status(found, one, ready=True).is_well]
    began = datetime.now(UTC)
    for one in hurt:
        _boot_again(found, one)
    _finish(found)
    daemons.wait_api(found).wait_ready([one.name for one in hurt], READY_SECONDS, since=began)


def _finish(found: State) -> None:
    """Everything that needs the API server; ends when pods can be run."""
    api = daemons.wait_api(found)
    daemons.allow_dns(api)
    for name in daemons.DAEMONS:
        daemons.start(found, name)
    nodes = layout.nodes(found.node_count)
    for one in nodes:
        node.start_services(found, one)
    daemons.wait_s3()
    api.wait_ready([one.name for one in nodes], READY_SECONDS)
    if not wait(lambda: api.answers("/api/v1/namespaces/default/serviceaccounts/default"), READY_SECONDS):
        raise ClusterError(f"no service account appears; read {daemons.log('kube-controller-manager')}")


def _boot_again(found: State, target: Node) -> None:
    network.join(target)  # first: a kubelet that starts on a dead link waits long before it tries again
    if not found.is_alive(target.name):
        node.crash(found, target)  # what is left of its first process's parent
        network.forget_pods(target)
        cgroups.remove(target)
        node.boot(found, target)
    residents.go_on(found, target)
    node.start_containerd(found, target)


def _make_mount_points(fresh: State) -> None:
    """Folders that nodes lay their own over must be there on the host; those we made are taken away again."""
    for own in node_files.OWN_FOLDERS:
        path = Path(own)
        if not path.exists():
            fresh.made_folders.append(own)
            fresh.save()
            path.mkdir(parents=True)


def _target(name: str) -> tuple[State, Node]:
    found = state.required()
    for one in layout.nodes(found.node_count):
        if one.name == name:
            return found, one
    raise ClusterError(f"there is no {name}; there are node-1 to node-{found.node_count}")


def _node_status(found: State, one: Node, ready: bool) -> NodeStatus:
    return NodeStatus(
        one.name,
        ready,
        found.is_alive(one.name),
        node.is_frozen(found, one),
        network.is_joined(one),
        residents.find(found, one, "kubelet") is not None,
    )
