"""Reads the output of worker pods from an API server.

Touches the network. A container that has not started, or whose pod has just gone, is a note; a missing right ends the command.
"""

from __future__ import annotations

from typing import Any

from surefoot_operator.cli.cluster_access import OpenCluster
from surefoot_operator.cli.cluster_refusals import Right, refused
from surefoot_operator.errors import FabricError
from surefoot_operator.platforms.kubernetes import api_objects
from surefoot_operator.platforms.kubernetes.api_errors import ApiRefused

_MOST_BYTES = 8 << 20


async def read_pod_log(cluster: OpenCluster, pod: dict[str, Any], most_lines: int, notes: list[str]) -> str:
    """Reads the newest lines of a worker's trainer container, stamped. Raises ClusterRefused."""
    metadata = pod["metadata"]
    path = api_objects.core_path(metadata["namespace"], "pods", metadata["name"]) + "/log"
    query: dict[str, str | int] = {
        "container": api_objects.TRAINER,
        "timestamps": "true",
        "tailLines": most_lines,
        "limitBytes": _MOST_BYTES,
    }
    try:
        return await cluster.api.text(path, query)
    except FabricError as error:
        if isinstance(error, ApiRefused) and error.code in (400, 404):
            notes.append(f"{metadata['name']} has no log: {error}")
            return ""
        raise refused(error, Right("get", "pods/log", metadata["namespace"]), cluster.server) from error
