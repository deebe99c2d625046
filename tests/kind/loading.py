"""Images of a docker brought into kind's nodes as a stream: `kind load` would first write torch into /tmp.

Nodes on one disk share what they have of an image but for the unpacked files: the layers of torch are as large again.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from images.docker import Docker
from images.errors import ImagesError

IMPORT = ("ctr", "--namespace", "k8s.io", "images", "import", "--digests", "-")
BLOBS = "lib/containerd/io.containerd.content.v1.content/blobs/sha256"
CHUNK_BYTES = 1 << 20
END_SECONDS = 900.0


def load(docker: Docker, image: str, nodes: Sequence[str]) -> None:
    """Each node one after the other, so that there is one copy more than there will be, and not as many as nodes.

    Raises:
        ImagesError: a node did not take it, in its own words.
    """
    first = _blobs(docker, nodes[0])
    for node in nodes:
        if node != nodes[0] and first is not None:
            _share(first, _blobs(docker, node))
        _import(docker, image, node)


def _import(docker: Docker, image: str, node: str) -> None:
    command = [docker.program, "exec", "--interactive", node, *IMPORT]
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


def _blobs(docker: Docker, node: str) -> Path | None:
    """Where the node's containerd keeps layers, as this machine sees it; None where it does not."""
    mounts = json.loads(docker.run("inspect", "--format", "{{json .Mounts}}", node))
    for mount in mounts:
        found = Path(mount["Source"], BLOBS)
        if mount["Destination"] == "/var" and found.is_dir():
            return found
    return None


def _share(source: Path, target: Path | None) -> None:
    """Whatever the target lacks, by another name of the same file: an import then finds that it is there."""
    if target is None or source.stat().st_dev != target.stat().st_dev:
        return
    for blob in source.iterdir():
        if not (target / blob.name).exists():
            os.link(blob, target / blob.name)
