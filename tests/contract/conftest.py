"""What several suites of one contract stand on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.servers import redis_server, s3_server
from surefoot.holder.provisioning import HolderAdmin
from surefoot.holder.server_process import HolderServer
from surefoot.settings import PersistentSettings
from surefoot.tiers import ObjectStoreTier, open_persistent


@pytest.fixture(params=["directory", "s3"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PersistentSettings]:
    """A new persistent tier of each kind."""
    if request.param == "directory":
        yield PersistentSettings(uri=(tmp_path / "kept").as_uri())
        return
    with s3_server.running(tmp_path) as server:
        yield server.settings()


@pytest.fixture
def tier(settings: PersistentSettings) -> Iterator[ObjectStoreTier]:
    opened = open_persistent(settings, "job-1")
    yield opened
    opened.close()


@pytest.fixture
def admin(server: HolderServer) -> Iterator[HolderAdmin]:
    """Of the module's own `server`."""
    opened = redis_server.admin_of(server)
    yield opened
    opened.close()
