"""What a registry would give, made here where none answers: kind's node, the memory tier's Redis, the examples' S3 server.

Each is used under the name that documents, chart and kind know it by, so that what is tried is what is written.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import yaml

from cluster import kind
from images import build, plan
from images.docker import Docker, observe
from images.errors import ImagesError
from kind import node_image
from support.servers import s3_server

CHART = build.PROJECT / "charts" / "surefoot"
HERE = Path(__file__).parent
S3_SERVER = build.PROJECT / "examples" / "s3-server.yaml"
BUILD_SECONDS = 600.0
Say = Callable[[str], None]


def node(docker: Docker, say: Say) -> str:
    """The image of kind's nodes.

    Raises:
        ImagesError: neither pulled nor made; why.
    """
    refusal = build.pull(docker, kind.IMAGE)
    if refusal is None:
        return kind.IMAGE
    say(f"{kind.IMAGE} cannot be pulled ({refusal}); one of Debian's packages stands in")
    _base(docker, say)
    return node_image.make(docker)


def redis_name() -> str:
    """The chart's default."""
    told = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))["memoryTier"]["image"]
    return f"{told['repository']}:{told['tag']}"


def redis(docker: Docker, say: Say) -> str:
    """The memory tier's image, under the name that the chart has for it."""
    name = redis_name()
    refusal = build.pull(docker, name)
    if refusal is not None:
        say(f"{name} cannot be pulled ({refusal}); Debian's Redis stands in under its name")
        _made(docker, name, HERE / "redis", say)
    return name


def s3_name(text: str) -> str:
    """Of the examples' S3 server: the one image there that is not ours. Pure."""
    [name] = {name for name in re.findall(r"^\s+image: (\S+)$", text, re.MULTILINE) if not name.startswith("surefoot/")}
    return str(name)


def s3(docker: Docker, say: Say) -> str:
    """The S3 server's image, under the name that the example has for it.

    Raises:
        ImagesError: neither pulled nor built; why.
    """
    name = s3_name(S3_SERVER.read_text(encoding="utf-8"))
    refusal = build.pull(docker, name)
    if refusal is not None:
        say(f"{name} cannot be pulled ({refusal}); one built from the Go module proxy stands in under its name")
        program = s3_server.versitygw()
        if program is None:
            raise ImagesError(f"{name} cannot be pulled, and there is no Go to build it: install Go 1.25 or newer")
        with tempfile.TemporaryDirectory(prefix="surefoot-kind-s3-") as folder:
            shutil.copy2(program, Path(folder, "versitygw"))
            shutil.copy2(HERE / "s3" / "Dockerfile", folder)
            _made(docker, name, Path(folder), say)
    return name


def _made(docker: Docker, name: str, folder: Path, say: Say) -> None:
    """Builds a stand-in on the base of Debian's packages."""
    _base(docker, say)
    network = () if docker.can_bridge else ("--network", "host")
    told = ("build", "--tag", name, *network, "--build-arg", f"BASE={plan.MADE_BASE}", str(folder))
    said = docker.tried(*told, "--progress", "plain", seconds=BUILD_SECONDS)
    if said.returncode != 0:
        raise ImagesError(f"the stand-in for {name} does not build: {said.stderr.strip()[-800:]}")


def _base(docker: Docker, say: Say) -> None:
    chosen, _ = build.find_base(docker, plan.NAMED_BASE, observe(), say)
    if not chosen.is_made:
        raise ImagesError("a registry gives the base and not the rest: pull them by hand, then try again")
