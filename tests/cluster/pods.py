"""What a pod needs to run the host's own programs: volumes and mounts instead of an image of gigabytes. Pure but for looking."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from cluster import layout
from cluster.images import MERGED


def host_folders() -> list[Path]:
    """Programs, libraries, certificates, the interpreter and the checkout with its virtual environment."""
    found = [Path("/usr"), Path("/etc/ssl")]
    found += [Path("/", name) for name in MERGED if Path("/", name).is_dir() and not Path("/", name).is_symlink()]
    found += [path for path in (Path("/etc/alternatives"), Path("/etc/ld.so.cache")) if path.exists()]
    found += [Path(sys.base_prefix), layout.PROJECT, Path(sys.prefix)]
    kept: list[Path] = []
    for path in found:
        if not any(path.is_relative_to(other) for other in kept):
            kept.append(path)
    return kept


def host_mounts(host_prefix: str = "") -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """`volumes` of a pod and `volumeMounts` of its container, read-only. `host_prefix`: where nodes see the host's root."""
    volumes, mounts = [], []
    for number, path in enumerate(host_folders()):
        kind = "Directory" if path.is_dir() else "File"
        volumes.append({"name": f"host-{number}", "hostPath": {"path": f"{host_prefix}{path}", "type": kind}})
        mounts.append({"name": f"host-{number}", "mountPath": str(path), "readOnly": True})
    return volumes, mounts


def host_environment() -> list[dict[str, str]]:
    """`env` of a container that runs the host's programs: this checkout, whichever one the environment was installed from."""
    path = f"{Path(sys.prefix) / 'bin'}:/usr/local/bin:/usr/bin:/bin"
    sources = f"{layout.PROJECT / 'operator'}:{layout.PROJECT / 'runtime'}"
    return [{"name": "PATH", "value": path}, {"name": "PYTHONPATH", "value": sources}]


def host_pod(name: str, command: list[str], node: str | None = None, host_prefix: str = "") -> dict[str, Any]:
    """A pod that runs a command of the host once."""
    volumes, mounts = host_mounts(host_prefix)
    container = {"name": "main", "image": layout.HOST_IMAGE, "command": command, "volumeMounts": mounts}
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
        "volumes": volumes,
    }
    if node is not None:
        spec["nodeSelector"] = {"kubernetes.io/hostname": node}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": spec,
    }
