"""The images, built once for all tests here; without docker, and where none can be begun, the tests are skipped with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from images import build, daemon, plan
from images.containers import Containers
from images.docker import Docker, observe
from images.errors import ImagesError
from images.recipes import OPERATOR, RECIPES, RUNTIME, Release, build_arguments


@dataclass(frozen=True)
class Built:
    """Images under the names that the chart and the examples have them by, on one docker."""

    docker: Docker
    release: Release

    @property
    def operator(self) -> str:
        return self.release.tag(OPERATOR)

    @property
    def runtime(self) -> str:
        return self.release.tag(RUNTIME)


@pytest.fixture(scope="session")
def built() -> Iterator[Built]:
    machine = observe()
    try:
        chosen = plan.daemon(machine)
    except ImagesError as reason:
        pytest.skip(str(reason))
    with daemon.docker(chosen, daemon.cache_folder()) as docker:
        _, base = build.find_base(docker, plan.NAMED_BASE, machine, print)
        release = build.release("surefoot/", "unknown")
        for recipe in RECIPES:
            build.build(docker, recipe, build_arguments(recipe, release, base, docker.can_bridge, ""))
        yield Built(docker, release)


@pytest.fixture
def containers(built: Built) -> Containers:
    return Containers(built.docker)
