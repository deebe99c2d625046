"""Images of a docker brought into kind's nodes: `kind load` would first write torch into /tmp, and unpack it once a node.

Docker's archive of an image is read once, by the first node. Where the nodes' disks are folders of one file system, the others get the
files of its blobs and unpacked layers by further names (`sharing.py`): three times torch, as an archive and unpacked, would be 36 GB
to write and to keep, and its libraries would be in memory three times.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from images.docker import Docker
from images.errors import ImagesError
from kind import sharing
from kind.sharing import Disk

IMPORT = ("images", "import", "--digests", "-")
PULLED = "/var/lib/kubelet/image_manager/pulled"
CHUNK_BYTES = 1 << 20
END_SECONDS = 900.0


def load(docker: Docker, image: str, nodes: Sequence[str]) -> None:
    """Each node one after the other, so that there is one copy more than there will be, and not as many as nodes.

    Raises:
        ImagesError: a node did not take it, in its own words.
    """
    first, *others = nodes
    _import(docker, image, first)
    source = _disk(docker, first)
    for node in others:
        target = _disk(docker, node)
        shared = sharing.find(docker, image, source) if source is not None else None
        if source is not None and target is not None and shared is not None and source.is_beside(target):
            sharing.share(docker, shared, source, target)
        else:
            _import(docker, image, node)


def forget_pulls(docker: Docker, node: str) -> None:
    """A run before may have pulled the same image with a secret: kubelet then gives it to nobody without that secret."""
    if docker.tried("exec", node, "find", PULLED, "-type", "f").stdout.strip():
        docker.run("exec", node, "find", PULLED, "-type", "f", "-delete")
        docker.run("exec", node, "systemctl", "restart", "kubelet")


def _import(docker: Docker, image: str, node: str) -> None:
    command = [docker.program, "exec", "--interactive", node, *sharing.CTR, *IMPORT]
    with (
        docker.saved(image) as archive,
        subprocess.Popen(
            command,
            env=docker.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        ) as importer,
    ):
        assert importer.stdin is not None
        try:
            while chunk := archive.read(CHUNK_BYTES):
                importer.stdin.write(chunk)
        except BrokenPipeError:
            pass  # its words say why
        _, words = importer.communicate(timeout=END_SECONDS)
    if importer.returncode != 0:
        raise ImagesError(f"{node} did not take {image}: {words.decode(errors='replace').strip()[-500:]}")


def _disk(docker: Docker, node: str) -> Disk | None:
    """The node's, as this machine sees it; None where it does not."""
    for mount in json.loads(docker.run("inspect", "--format", "{{json .Mounts}}", node)):
        found = Disk(node, Path(mount["Source"]))
        if mount["Destination"] == "/var" and found.blobs.is_dir():
            return found
    return None
