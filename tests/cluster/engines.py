"""Chooses: the engine of the cluster that is there, else kind where a docker daemon answers, else namespaces."""

from __future__ import annotations

from cluster import kind, own, state
from cluster.engine import Engine
from cluster.errors import ClusterError

NAMES = (kind.NAME, own.NAME)


def choose(wanted: str | None = None) -> Engine:
    """One cluster a machine: a wish that differs from what is there is refused."""
    found = state.load()
    if found is not None and wanted not in (None, found.engine):
        raise ClusterError(f"a cluster of engine {found.engine} is there; take it `down` first")
    name = found.engine if found is not None else wanted
    if name is None:
        name = kind.NAME if kind.docker_answers() else own.NAME
    return kind.KindCluster() if name == kind.NAME else own.OwnCluster()
