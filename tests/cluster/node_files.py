"""The configuration files of a node: containerd, CNI, kubelet, and the script that lays its mount namespace. Written once by `up`."""

from __future__ import annotations

import json
from pathlib import Path

from cluster import cgroups, credentials, layout, packages
from cluster.errors import ClusterError
from cluster.layout import Node

# folders that would be one node's alone if it were a machine: each is laid over the host's in the node's mount namespace
OWN_FOLDERS = ("/var/lib/kubelet", "/var/lib/containerd", "/var/lib/cni", "/var/log/pods", "/var/log/containers")


def write(node: Node) -> None:
    """All of them."""
    for own in OWN_FOLDERS:
        disk(node, own).mkdir(parents=True, exist_ok=True)
    cni = node.folder / "cni"
    cni.mkdir(exist_ok=True)
    (cni / "10-bridge.conflist").write_text(json.dumps(_cni(node), indent=1))
    (node.folder / "containerd.toml").write_text(_containerd(node))
    (node.folder / "kubelet.json").write_text(json.dumps(_kubelet(node), indent=1))
    (node.folder / "resolv.conf").write_text(f"nameserver {layout.HOST_ADDRESS}\n")
    (node.folder / "init.sh").write_text(_init(node))


def disk(node: Node, own: str) -> Path:
    """Where a folder that the node sees as its own lies on the host."""
    return node.folder / "disk" / own.strip("/")


def _init(node: Node) -> str:
    lines = ["set -e"]
    lines += [f"mount --bind {disk(node, own)} {own}" for own in OWN_FOLDERS]
    # what a reboot forgets: sockets, running containers, names of pods' network namespaces
    lines += ["mount -t tmpfs -o mode=755,size=64m tmpfs /run", "mkdir -p /run/containerd /run/lock"]
    lines += ["mount --make-rshared /", f"hostname {node.name}"]
    lines += [f"exec {node.folder / 'init'}"]
    return "\n".join(lines) + "\n"


def _containerd(node: Node) -> str:
    programs = packages.cni_folder()
    if programs is None:
        raise ClusterError(f"no CNI plugins in {', '.join(map(str, packages.CNI_FOLDERS))}")
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    return f"""version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs"]
[grpc]
address = "/run/containerd/containerd.sock"
[{cri}]
sandbox_image = "{layout.PAUSE_IMAGE}"
# without CAP_SYS_RESOURCE nobody may make a process less likely to be killed
restrict_oom_score_adj = true
[{cri}.containerd]
snapshotter = "native"
[{cri}.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[{cri}.cni]
bin_dir = "{programs}"
conf_dir = "{node.folder / "cni"}"
"""


def _cni(node: Node) -> dict[str, object]:
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "hairpinMode": True,
        "ipMasq": False,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": node.pod_network}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]}


def _kubelet(node: Node) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": node.address,
        # a test cluster on a bridge nobody else is on
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "clusterDNS": [layout.HOST_ADDRESS],
        "clusterDomain": layout.CLUSTER_DOMAIN,
        "resolvConf": str(node.folder / "resolv.conf"),
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": cgroups.of_node(node),
        "cgroupsPerQOS": True,
        "enforceNodeAllocatable": [],
        "failSwapOn": False,
        "failCgroupV1": False,
        "oomScoreAdj": 0,
        "volumePluginDir": "/var/lib/kubelet/plugins-exec",
        # the disk is the host's: that it is full is no reason to evict anybody
        "evictionHard": {"nodefs.available": "0%", "nodefs.inodesFree": "0%", "imagefs.available": "0%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "maxPods": 200,
    }


def kubelet_command(node: Node, program: Path) -> list[str]:
    """Its command line on the node."""
    return [
        str(program),
        f"--config={node.folder / 'kubelet.json'}",
        f"--kubeconfig={credentials.kubeconfig(node.name)}",
        f"--hostname-override={node.name}",
        f"--node-ip={node.address}",
        f"--node-labels=topology.kubernetes.io/zone={node.zone}",
    ]


def proxy_command(node: Node, program: Path) -> list[str]:
    """Its command line on the node."""
    return [
        str(program),
        f"--kubeconfig={credentials.kubeconfig('kube-proxy')}",
        "--proxy-mode=nftables",
        f"--cluster-cidr={layout.POD_NETWORK}",
        f"--hostname-override={node.name}",
        f"--bind-address={node.address}",
        "--conntrack-max-per-core=0",  # a limit of the whole machine: it is not the node's to set
        "--conntrack-tcp-timeout-established=0",
        "--conntrack-tcp-timeout-close-wait=0",
        "--oom-score-adj=0",
    ]
