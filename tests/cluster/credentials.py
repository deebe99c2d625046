"""Tokens, kubeconfigs and the key of service accounts; made anew by each `up`, readable by root alone. The API server signs its own certificate."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from cluster import layout
from cluster.layout import Node
from cluster.processes import run

TOKENS = layout.SECRETS / "tokens.csv"
SERVICE_ACCOUNT_KEY = layout.SECRETS / "service-accounts.key"
CERTIFICATE = layout.SECRETS / "apiserver.crt"
DNS_USER = "system:coredns"


def write(nodes: Sequence[Node]) -> None:
    """All of them."""
    layout.SECRETS.mkdir(parents=True, exist_ok=True)
    layout.SECRETS.chmod(0o700)
    run("openssl", "genrsa", "-out", str(SERVICE_ACCOUNT_KEY), "2048")
    users = [
        ("admin", "admin", "system:masters", layout.KUBECONFIG),
        ("kube-controller-manager", "system:kube-controller-manager", "", kubeconfig("kube-controller-manager")),
        ("kube-scheduler", "system:kube-scheduler", "", kubeconfig("kube-scheduler")),
        ("kube-proxy", "system:kube-proxy", "", kubeconfig("kube-proxy")),
        ("coredns", DNS_USER, "", kubeconfig("coredns")),
    ]
    users += [(node.name, f"system:node:{node.name}", "system:nodes", kubeconfig(node.name)) for node in nodes]
    lines = []
    for uid, user, group, path in users:
        token = secrets.token_urlsafe(24)
        lines.append(f'{token},{user},{uid},"{group}"' if group else f"{token},{user},{uid}")
        _private(path, json.dumps(_kubeconfig(token), indent=1))
    _private(TOKENS, "\n".join(lines) + "\n")


def kubeconfig(who: str) -> Path:
    """Where a component's kubeconfig lies."""
    return layout.SECRETS / f"{who}.kubeconfig"


def _kubeconfig(token: str) -> dict[str, object]:
    name = "surefoot-test"
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": name, "cluster": {"server": layout.API_URL, "certificate-authority": str(CERTIFICATE)}},
        ],
        "users": [{"name": name, "user": {"token": token}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "current-context": name,
    }


def _private(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
