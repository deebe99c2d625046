"""The same cluster from kind, where a docker daemon answers. A node is a docker container: crash is `docker kill`, a frozen one is paused.

Nodes see this machine's root folder read-only at `HOST_PREFIX`; the S3 server runs here, on the address of kind's network.
"""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime

from cluster import binaries, images, layout, state
from cluster.api import Api
from cluster.engine import READY_SECONDS, Facts, NodeStatus, Status
from cluster.errors import ClusterError
from cluster.own import running_container
from cluster.processes import end, run, spawn, wait
from support.servers import s3_server

NAME = "kind"
CLUSTER = "surefoot-test"
IMAGE = "kindest/node:v1.35.0"
HOST_PREFIX = "/surefoot-host"
CREATE_SECONDS = 600.0


class KindCluster:
    """Implements Engine with kind. Node names are the docker containers': surefoot-test-worker, -worker2, -worker3."""

    def __init__(self, image: str = IMAGE) -> None:
        self._image = image

    def up(self, count: int) -> None:
        """Makes it unless it is there; then brings back every node."""
        with state.locked():
            kind, found = str(binaries.kind()), state.load()
            if found is not None and not (found.is_complete and found.node_count == count):
                _remove()
                found = None
            if found is None:
                found = _make(kind, count, self._image)
            if not found.is_alive("s3"):
                _start_s3(found)
        for name in _names(count):
            self.return_node(name)

    def down(self) -> None:
        """Containers, S3 server and folder."""
        with state.locked():
            _remove()

    def status(self) -> Status:
        """What docker and the API server say."""
        found = state.required()
        api = Api(layout.KUBECONFIG)
        ready = api.ready_nodes()
        nodes = [_node_status(name, ready.get(name, False)) for name in _names(found.node_count)]
        return Status(NAME, api.answers(), nodes, {"s3": found.is_alive("s3")})

    def facts(self) -> Facts:
        """Where everything is."""
        names = _names(state.required().node_count)
        endpoint = f"http://{_gateway()}:{layout.S3_PORT}"
        programs = [binaries.kubernetes_folder(), binaries.helm().parent]
        return Facts(layout.KUBECONFIG, programs, endpoint, names, HOST_PREFIX)

    def crash(self, node: str, silently: bool = False) -> None:
        """SIGKILL to the node's first process: the kernel kills the rest of it."""
        if silently:
            self.partition(node)
        _docker("kill", node)

    def return_node(self, node: str) -> None:
        """Undoes whatever was done to it."""
        began = datetime.now(UTC)
        seen = _inspect(node)
        if not seen["Running"]:
            _docker("start", node)
        elif seen["Paused"]:
            _docker("unpause", node)
        self.heal(node)
        _start_kubelet(node)
        Api(layout.KUBECONFIG).wait_ready([node], READY_SECONDS, since=began)

    def freeze(self, node: str) -> None:
        """All of its processes stop."""
        _docker("pause", node)

    def thaw(self, node: str) -> None:
        """They go on."""
        _docker("unpause", node)

    def partition(self, node: str) -> None:
        """Its link goes down."""
        _docker("exec", node, "ip", "link", "set", "eth0", "down")

    def heal(self, node: str) -> None:
        """Its link comes up; the default route went with it, those to other nodes' pods come back by kindnet."""
        _docker("exec", node, "ip", "link", "set", "eth0", "up")
        _docker("exec", node, "ip", "route", "replace", "default", "via", _gateway())

    def stop_kubelet(self, node: str) -> None:
        """Containers live on."""
        _docker("exec", node, "systemctl", "kill", "--signal=SIGKILL", "kubelet")
        _docker("exec", node, "systemctl", "stop", "kubelet")

    def kill_container(self, namespace: str, pod: str, container: str | None = None) -> None:
        """SIGKILL to the first process of a pod's container."""
        body = Api(layout.KUBECONFIG).call("GET", f"/api/v1/namespaces/{namespace}/pods/{pod}")
        node, identity = running_container(body, container)
        tasks = _docker("exec", node, "ctr", "--namespace", "k8s.io", "tasks", "list")
        pid = task_pid(tasks, identity)
        if pid is None:
            raise ClusterError(f"container {identity} of {namespace}/{pod} does not run on {node}")
        _docker("exec", node, "kill", "-KILL", str(pid))

    def kill_daemon(self, name: str) -> None:
        """The S3 server here; a static pod's process on the control plane."""
        if name == "s3":
            with state.locked():
                end([state.required().processes["s3"]])
            return
        _docker("exec", f"{CLUSTER}-control-plane", "pkill", "-KILL", "-x", name[:15])

    def start_daemon(self, name: str) -> None:
        """The S3 server; kubelet restarts the others by itself."""
        if name == "s3":
            with state.locked():
                found = state.required()
                if not found.is_alive("s3"):
                    _start_s3(found)


def task_pid(listed: str, container: str) -> int | None:
    """Of what `ctr tasks list` prints: the first process of a container, as its node numbers it. Pure."""
    for line in listed.splitlines()[1:]:
        words = line.split()
        if words[:1] == [container] and words[2] == "RUNNING":
            return int(words[1])
    return None


def docker_answers() -> bool:
    """A client alone proves nothing: the daemon must answer."""
    if shutil.which("docker") is None:
        return False
    try:
        return run("docker", "info", "--format", "{{.ServerVersion}}", seconds=10, check=False).strip() != ""
    except ClusterError:
        return False  # no answer in time


def _make(kind: str, count: int, image: str) -> state.State:
    found = state.fresh(NAME, count)
    found.save()
    layout.RUNS.mkdir(parents=True, exist_ok=True)
    layout.RUNS.chmod(0o1777)  # pods write there under any user id
    mount = [
        {"hostPath": "/", "containerPath": HOST_PREFIX, "readOnly": True},
        {"hostPath": str(layout.RUNS), "containerPath": f"{HOST_PREFIX}{layout.RUNS}"},
    ]
    workers = [
        {"role": "worker", "extraMounts": mount, "labels": {"topology.kubernetes.io/zone": f"zone-{number}"}}
        for number in range(1, count + 1)
    ]
    config = {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "nodes": [{"role": "control-plane"}, *workers],
    }
    file = layout.ROOT / "kind.json"
    file.write_text(json.dumps(config, indent=1))
    create = [kind, "create", "cluster", "--name", CLUSTER, "--image", image, "--config", str(file)]
    run(*create, "--kubeconfig", str(layout.KUBECONFIG), "--wait", "120s", seconds=CREATE_SECONDS)
    for archive in images.write_archives(layout.ROOT / "images"):
        run(kind, "load", "image-archive", "--name", CLUSTER, str(archive), seconds=120)
    found.is_complete = True
    found.save()
    return found


def _remove() -> None:
    found = state.load()
    if found is not None and "s3" in found.processes:
        end([found.processes["s3"]])
    run(str(binaries.kind()), "delete", "cluster", "--name", CLUSTER, seconds=120)
    if layout.ROOT.exists():
        shutil.rmtree(layout.ROOT)


def _start_s3(found: state.State) -> None:
    program = s3_server.versitygw()
    if program is None:
        raise ClusterError("the cluster's S3 server is versitygw, built with Go: install Go 1.25 or newer")
    folder, address = layout.ROOT / "s3", f"{_gateway()}:{layout.S3_PORT}"
    log = layout.ROOT / "s3.log"
    found.record("s3", spawn(s3_server.command(program, folder, address), log, s3_server.environment(folder)))
    s3_server.make_bucket(f"http://{address}", READY_SECONDS)


def _start_kubelet(node: str) -> None:
    """Waits until the node's entrypoint has become systemd: whoever asks earlier is refused."""
    refused = ""

    def started() -> bool:
        nonlocal refused
        try:
            _docker("exec", node, "systemctl", "start", "kubelet")
        except ClusterError as error:
            refused = str(error)
            return False
        return True

    if not wait(started, READY_SECONDS):
        raise ClusterError(f"{node} does not boot: {refused}")


def _gateway() -> str:
    """This machine's address on kind's network, the IPv4 one."""
    networks = json.loads(_docker("network", "inspect", "kind"))
    gateways = [config.get("Gateway", "") for config in networks[0]["IPAM"]["Config"]]
    return str(next(gateway for gateway in gateways if "." in gateway))


def _names(count: int) -> list[str]:
    return [f"{CLUSTER}-worker{number if number > 1 else ''}" for number in range(1, count + 1)]


def _node_status(name: str, ready: bool) -> NodeStatus:
    seen = _inspect(name)
    can_ask = seen["Running"] and not seen["Paused"]
    flags = _docker("exec", name, "cat", "/sys/class/net/eth0/flags") if can_ask else "0x1"
    kubelet = can_ask and _docker("exec", name, "sh", "-c", "systemctl is-active kubelet || true").strip() == "active"
    return NodeStatus(name, ready, seen["Running"], seen["Paused"], bool(int(flags, 16) & 1), kubelet)


def _inspect(name: str) -> dict[str, bool]:
    seen = json.loads(_docker("inspect", "--format", "{{json .State}}", name))
    return {"Running": bool(seen["Running"]), "Paused": bool(seen["Paused"])}


def _docker(*arguments: str) -> str:
    return run("docker", *arguments, seconds=60)
