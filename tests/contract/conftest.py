"""What several suites of one contract stand on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.servers import redis_server, s3_server
from surefoot.memory_server.provisioning import MemoryServerAdmin
from surefoot.memory_server.server_process import RunningServer
from surefoot.settings import PersistentSettings
from surefoot.tiers import ObjectStoreTier, open_persistent


def _persistent(kind: str, folder: Path, prefix: str = "") -> Iterator[PersistentSettings]:
    if kind == "directory":
        yield PersistentSettings(uri=(folder / "kept").as_uri())
        return
    with s3_server.running(folder) as server:
        yield server.settings(prefix)


@pytest.fixture(params=["directory", "s3"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PersistentSettings]:
    """A new persistent tier of each kind."""
    yield from _persistent(request.param, tmp_path)


@pytest.fixture(params=["directory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PersistentSettings]:
    """The same, on S3 below a prefix."""
    yield from _persistent(request.param, tmp_path, "a/prefix")


@pytest.fixture
def tier(settings: PersistentSettings) -> Iterator[ObjectStoreTier]:
    opened = open_persistent(settings, "job-1", create_root=True)
    yield opened
    opened.close()


@pytest.fixture
def admin(server: RunningServer) -> Iterator[MemoryServerAdmin]:
    """Of the module's own `server`."""
    opened = redis_server.admin_of(server)
    yield opened
    opened.close()
