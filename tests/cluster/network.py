"""The wires: one bridge on the host, a network namespace and a link for each node, routes to the pods of every node."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cluster import layout
from cluster.errors import ClusterError
from cluster.layout import Node
from cluster.processes import run

NAMESPACES = Path("/run/netns")


def make(nodes: Sequence[Node]) -> None:
    """All of it; nothing of a former run may be left."""
    bits = layout.NODE_NETWORK_BITS
    _refuse_foreign_addresses()
    run("ip", "link", "add", layout.BRIDGE, "type", "bridge")
    run("ip", "address", "add", f"{layout.HOST_ADDRESS}/{bits}", "dev", layout.BRIDGE)
    run("ip", "link", "set", layout.BRIDGE, "up")
    for node in nodes:
        name = node.namespace
        run("ip", "netns", "add", name)
        run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "link", "set", name, "master", layout.BRIDGE, "up")
        _inside(name, "ip", "link", "set", "lo", "up")
        _inside(name, "ip", "address", "add", f"{node.address}/{bits}", "dev", "eth0")
        _inside(name, "ip", "link", "set", "eth0", "up")
        _inside(name, "sysctl", "-q", "-w", "net.ipv4.ip_forward=1")
        # pods of one node that meet through a Service must pass its translation on the way back too
        _inside(name, "sysctl", "-q", "-e", "-w", "net.bridge.bridge-nf-call-iptables=1")
        run("ip", "route", "replace", node.pod_network, "via", node.address)
    for node in nodes:
        _route(node, nodes)


def _route(node: Node, nodes: Sequence[Node]) -> None:
    _inside(node.namespace, "ip", "route", "replace", "default", "via", layout.HOST_ADDRESS)
    for other in nodes:
        if other != node:
            _inside(node.namespace, "ip", "route", "replace", other.pod_network, "via", other.address)


def cut(node: Node) -> None:
    """Nothing reaches the node, nothing leaves it; everything on it goes on running."""
    run("ip", "link", "set", node.namespace, "down")


def join(node: Node) -> None:
    """The link is whole again."""
    run("ip", "link", "set", node.namespace, "up")


def is_joined(node: Node) -> bool:
    """Whether the node's link is up."""
    try:
        flags = int(Path("/sys/class/net", node.namespace, "flags").read_text(), 16)
    except OSError:
        return False
    return bool(flags & 1)


def forget_pods(node: Node) -> None:
    """What a reboot does to the node's own network: the pods' bridge and the Services' tables are gone."""
    _inside(node.namespace, "nft", "flush", "ruleset")
    run("nsenter", f"--net={NAMESPACES / node.namespace}", "ip", "link", "delete", "cni0", check=False)  # may not exist


def leftovers(nodes: Sequence[Node]) -> list[str]:
    """Namespaces and links that stand on this machine now, named for people."""
    found = [f"namespace {node.namespace}" for node in nodes if (NAMESPACES / node.namespace).exists()]
    links = [layout.BRIDGE, *(node.namespace for node in nodes)]
    return found + [f"link {link}" for link in links if Path("/sys/class/net", link).exists()]


def remove(nodes: Sequence[Node]) -> None:
    """Takes away whatever of it is there; their nftables go with the namespaces."""
    for node in nodes:
        if Path("/sys/class/net", node.namespace).exists():
            run("ip", "link", "delete", node.namespace)
        if (NAMESPACES / node.namespace).exists():
            run("ip", "netns", "delete", node.namespace)
    if Path("/sys/class/net", layout.BRIDGE).exists():
        run("ip", "link", "delete", layout.BRIDGE)


def _refuse_foreign_addresses() -> None:
    routes = run("ip", "-4", "route", "show", "root", "10.213.0.0/16")
    if routes.strip():
        raise ClusterError(f"10.213.0.0/16 is used on this machine: {routes.strip()}; the cluster needs it to be free")


def _inside(namespace: str, *command: str) -> None:
    run("nsenter", f"--net={NAMESPACES / namespace}", *command)
