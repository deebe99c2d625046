"""A real cluster for a module of tests: the one that stands, else one of its own that is taken down at the end."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from cluster import binaries, engines, use
from cluster.engine import Engine
from cluster.kind import KindCluster


def a_cluster(nodes: int) -> Iterator[Engine]:
    """The body of a fixture; skips the test where no cluster can be had. Waits while another test run has it for itself."""
    if use.stands():
        with use.held(alone=False):
            if use.stands():  # whoever had it may have taken it down
                chosen = engines.choose()
                if not chosen.status().is_well:
                    pytest.skip("the cluster on this machine is hurt; `python -m cluster up` repairs it")
                yield chosen
                return
    chosen = engines.choose()
    if os.geteuid() != 0 and not isinstance(chosen, KindCluster):
        pytest.skip("namespaces need root")
    if shutil.which("go") is None and binaries.unbuilt():
        pytest.skip(f"there is no Go toolchain to build {', '.join(binaries.unbuilt())}")
    with use.held(alone=True), use.standing(nodes) as engine:
        yield engine
