"""Images of a docker brought into kind's nodes: written once, read by all nodes at the same time, never on disk between."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import ExitStack

from images.docker import Docker
from images.errors import ImagesError

IMPORT = ("ctr", "--namespace", "k8s.io", "images", "import", "--digests", "-")
CHUNK_BYTES = 1 << 20


def load(docker: Docker, image: str, nodes: Sequence[str]) -> None:
    """`kind load docker-image`, whose copy in /tmp would be the fourth of torch.

    Raises:
        ImagesError: a node did not take it, in its own words.
    """
    with ExitStack() as stack:
        archive = stack.enter_context(docker.saved(image))
        importers = [stack.enter_context(_importer(docker, node)) for node in nodes]
        while chunk := archive.read(CHUNK_BYTES):
            for importer in importers:
                assert importer.stdin is not None
                importer.stdin.write(chunk)
        for node, importer in zip(nodes, importers, strict=True):
            _, words = importer.communicate()
            if importer.returncode != 0:
                raise ImagesError(f"{node} did not take {image}: {words.decode(errors='replace').strip()[-500:]}")


def _importer(docker: Docker, node: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [docker.program, "exec", "--interactive", node, *IMPORT],
        env=docker.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
