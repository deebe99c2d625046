"""NetworkPolicies on nodes whose pods' network knows none: kube-router's firewall, where somebody has built it.

kind's own nodes enforce policies by themselves. Those that are made here do not, and no module that does can be had from the Go
module proxy: build kube-router of its repository with CGO_ENABLED=0, and name the program in SUREFOOT_KUBE_ROUTER.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from cluster import binaries, kind
from images.docker import Docker

VARIABLE = "SUREFOOT_KUBE_ROUTER"
PROGRAM, KUBECONFIG, UNIT = "/usr/local/bin/kube-router", "/etc/kubernetes/kube-router.conf", "kube-router"
FLAGS = (
    "--run-router=false",
    "--run-firewall=true",
    "--run-service-proxy=false",
    "--run-loadbalancer=false",
    "--iptables-sync-period=30s",
)


def start(docker: Docker, nodes: list[str]) -> bool:
    """On each node, unless it runs there; False where nobody named the program."""
    program = os.environ.get(VARIABLE)
    if not program:
        return False
    asked = [str(binaries.kind()), "get", "kubeconfig", "--internal", "--name", kind.CLUSTER]
    config = subprocess.run(asked, env=docker.environment, capture_output=True, check=True, timeout=60).stdout
    for node in nodes:
        if docker.tried("exec", node, "systemctl", "is-active", UNIT).stdout.strip() == "active":
            continue
        docker.run("cp", str(Path(program).resolve()), f"{node}:{PROGRAM}")
        written = [docker.program, "exec", "--interactive", node, "cp", "/dev/stdin", KUBECONFIG]
        subprocess.run(written, env=docker.environment, input=config, check=True, timeout=60)
        run = ("systemd-run", f"--unit={UNIT}", "--property=Restart=always", f"--setenv=NODE_NAME={node}", PROGRAM)
        docker.run("exec", node, *run, f"--kubeconfig={KUBECONFIG}", f"--hostname-override={node}", *FLAGS)
    return True
