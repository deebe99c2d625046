"""A registry of images and charts on this machine: the program that Docker's own image of one runs. It may want a password."""

from __future__ import annotations

import base64
import ctypes
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import yaml

from cluster import binaries
from cluster.errors import ClusterError
from cluster.processes import end, spawn, wait

ANSWER_SECONDS = 60.0
BCRYPT = b"$2b$05$"
SALT = b"surefootsurefootsurefo"
HOST = """server = "http://{address}"
[host."http://{address}"]
  capabilities = ["pull", "resolve"]
"""


@dataclass(frozen=True)
class Account:
    """Who may pull and push."""

    name: str
    password: str

    def docker_config(self, address: str) -> str:
        """As docker and pull secrets have it."""
        word = base64.b64encode(f"{self.name}:{self.password}".encode()).decode()
        return json.dumps({"auths": {address: {"auth": word}}})

    def htpasswd(self) -> str:
        """Its line in the registry's file; bcrypt is all that the registry knows, and the C library makes it."""
        crypt = ctypes.CDLL("libcrypt.so.1").crypt
        crypt.restype = ctypes.c_char_p
        made: bytes = crypt(self.password.encode(), BCRYPT + SALT)
        return f"{self.name}:{made.decode()}\n"


@contextmanager
def serving(folder: Path, account: Account | None = None, host: str = "127.0.0.1") -> Iterator[int]:
    """Its port, until the block ends.

    Raises:
        ClusterError: it does not answer; where its last words are.
    """
    with socket.socket() as probe:
        probe.bind((host, 0))
        port = int(probe.getsockname()[1])
    told: dict[str, object] = {"version": 0.1, "http": {"addr": f"{host}:{port}"}}
    told["storage"] = {"filesystem": {"rootdirectory": str(folder / "content")}}
    if account is not None:
        (folder / "htpasswd").write_text(account.htpasswd())
        told["auth"] = {"htpasswd": {"realm": "surefoot", "path": str(folder / "htpasswd")}}
    (folder / "registry.yaml").write_text(yaml.safe_dump(told))
    log = folder / "registry.log"
    process = spawn([str(binaries.registry()), "serve", str(folder / "registry.yaml")], log)
    try:
        if not wait(lambda: _answers(port), ANSWER_SECONDS):
            raise ClusterError(f"the registry does not answer; its last words are in {log}")
        yield port
    finally:
        end([process])


def described(address: str) -> tuple[str, str]:
    """Path and content of the file by which a node's containerd reaches it without TLS. Pure."""
    return f"/etc/containerd/certs.d/{address}/hosts.toml", HOST.format(address=address)


def _answers(port: int) -> bool:
    asked = HTTPConnection("127.0.0.1", port, timeout=5.0)
    try:
        asked.request("GET", "/v2/")
        return asked.getresponse().status in (200, 401)
    except (OSError, HTTPException):
        return False
    finally:
        asked.close()
