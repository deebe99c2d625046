"""Images of a docker brought into kind's nodes as a stream: `kind load` would first write torch into /tmp.

Nodes on one disk share the files of what they have: three times torch, as an archive and unpacked, is 36 GB, and its libraries
would be in memory three times.
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
SNAPSHOTS = "lib/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots"
SHARED_BYTES = 1 << 20
"""Smaller files are not worth a look."""
CHUNK_BYTES = 1 << 20
END_SECONDS = 900.0


def load(docker: Docker, image: str, nodes: Sequence[str]) -> None:
    """Each node one after the other, so that there is one copy more than there will be, and not as many as nodes.

    Raises:
        ImagesError: a node did not take it, in its own words.
    """
    first = _folder(docker, nodes[0])
    for node in nodes:
        other = _folder(docker, node) if node != nodes[0] else None
        is_shared = first is not None and other is not None and first.stat().st_dev == other.stat().st_dev
        if first is not None and other is not None and is_shared:
            _share_blobs(first / BLOBS, other / BLOBS)
        _import(docker, image, node)
        if first is not None and other is not None and is_shared:
            _share_files(first / SNAPSHOTS, other / SNAPSHOTS)


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


def _folder(docker: Docker, node: str) -> Path | None:
    """The node's /var, as this machine sees it; None where it does not."""
    for mount in json.loads(docker.run("inspect", "--format", "{{json .Mounts}}", node)):
        found = Path(mount["Source"])
        if mount["Destination"] == "/var" and (found / BLOBS).is_dir():
            return found
    return None


def _share_blobs(source: Path, target: Path) -> None:
    """Whatever the target lacks, by another name of the same file: an import then finds that it is there."""
    for blob in source.iterdir():
        if not (target / blob.name).exists():
            os.link(blob, target / blob.name)


def _share_files(source: Path, target: Path) -> None:
    """Files of unpacked layers, which nobody writes: pods write into layers of their own. Ids of layers differ between nodes."""
    known = {_identity(path, source): path for path in _large_files(source)}
    for path in _large_files(target):
        same = known.get(_identity(path, target))
        if same is not None and not same.samefile(path):
            fresh = path.with_name(f".{path.name}.shared")
            os.link(same, fresh)
            os.replace(fresh, path)


def _large_files(snapshots: Path) -> list[Path]:
    found = []
    for folder, _, names in os.walk(snapshots):
        for name in names:
            path = Path(folder, name)
            if not path.is_symlink() and path.is_file() and path.stat().st_size >= SHARED_BYTES:
                found.append(path)
    return found


def _identity(path: Path, snapshots: Path) -> tuple[str, int, int, int, int]:
    """Path within the layer, and all that a link shares but the content, which a layer's path, size and date stand for."""
    seen = path.stat()
    within = str(Path(*path.relative_to(snapshots).parts[1:]))
    return within, seen.st_size, seen.st_mtime_ns, seen.st_mode, seen.st_uid
