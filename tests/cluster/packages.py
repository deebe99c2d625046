"""The Debian packages a cluster without docker stands on: looked for, and installed by apt where we are root."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from cluster.errors import ClusterError

PROGRAMS = {  # program → Debian package
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "etcd": "etcd-server",
    "nft": "nftables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "redis-server": "redis-server",
    "openssl": "openssl",
    "nsenter": "util-linux",
    "unshare": "util-linux",
}
CNI_PACKAGE = "containernetworking-plugins"
CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
CNI_PLUGINS = ("bridge", "host-local", "loopback")


def cni_folder() -> Path | None:
    """Where the CNI plugins lie."""
    for folder in CNI_FOLDERS:
        if all((folder / plugin).exists() for plugin in CNI_PLUGINS):
            return folder
    return None


def missing() -> list[str]:
    """Packages that are still to be installed."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    needed = {package for program, package in PROGRAMS.items() if shutil.which(program, path=path) is None}
    if cni_folder() is None:
        needed.add(CNI_PACKAGE)
    return sorted(needed)


def ensure() -> None:
    """Installs what is missing, or says what to install."""
    needed = missing()
    if not needed:
        return
    by_hand = "apt-get install --no-install-recommends " + " ".join(needed)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise ClusterError(f"these are missing: {', '.join(needed)}. As root: {by_hand}")
    print(f"installing {', '.join(needed)}", flush=True)
    # no services: the cluster starts its own daemons, and Debian's would hold ports and folders
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    install = ["apt-get", "install", "--yes", "--no-install-recommends", *needed]
    for command in (install, ["apt-get", "update"], install):  # lists may be missing or old
        done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=600)
        if command is install and done.returncode == 0 and not missing():
            return
    raise ClusterError(f"`{by_hand}` did not bring everything: {(done.stderr or done.stdout).strip()[-800:]}")
