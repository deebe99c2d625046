"""The stage that all scenarios of a test run share, and what they find on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.engine import Engine
from cluster.scenarios.installed import Installed
from cluster.scenarios.stage import Stage
from support.servers.kubernetes_cluster import a_cluster

_NODES = 3


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    """Opened once; when the last scenario has run, every job that still runs is ended and compared."""
    for engine in a_cluster(_NODES):
        if len(engine.facts().node_names) < _NODES:
            pytest.skip(f"scenarios need {_NODES} nodes; `python -m cluster down` takes the smaller cluster away")
        opened = Stage(engine).open()
        try:
            yield opened
        finally:
            opened.close()


@pytest.fixture
def engine_of(stage: Stage) -> Iterator[Engine]:
    """The cluster to hurt: whatever the test leaves hurt is well again afterwards."""
    yield stage.engine
    stage.make_well()


@pytest.fixture
def installed(stage: Stage) -> Installed:
    return stage.installed
