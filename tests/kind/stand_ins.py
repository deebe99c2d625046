"""What a registry would give, made of Debian's packages where none answers: kind's node, and the memory tier's Redis.

Each is used under the name that documents, chart and kind know it by, so that what is tried is what is written.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import yaml

from cluster import kind
from images import build, plan
from images.docker import Docker, observe
from images.errors import ImagesError
from kind import node_image

CHART = build.PROJECT / "charts" / "surefoot"
REDIS_FOLDER = Path(__file__).parent / "redis"
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
        _base(docker, say)
        network = () if docker.can_bridge else ("--network", "host")
        told = ("build", "--tag", name, *network, "--build-arg", f"BASE={plan.MADE_BASE}", str(REDIS_FOLDER))
        said = docker.tried(*told, "--progress", "plain", seconds=BUILD_SECONDS)
        if said.returncode != 0:
            raise ImagesError(f"Redis' image does not build: {said.stderr.strip()[-800:]}")
    return name


def _base(docker: Docker, say: Say) -> None:
    chosen, _ = build.find_base(docker, plan.NAMED_BASE, observe(), say)
    if not chosen.is_made:
        raise ImagesError("a registry gives the base and not the rest: pull them by hand, then try again")
