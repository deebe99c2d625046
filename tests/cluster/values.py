"""The chart's values for this cluster: the host's folders are mounted instead of images that nobody built. Pure but for looking.

`helm install surefoot charts/surefoot -n surefoot-system -f -` reads them as JSON or YAML; `programs()` says how agents
are started. Called by the tests that install the chart.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

from cluster import layout
from cluster.engine import Facts
from cluster.pods import host_environment, host_mounts

Values = dict[str, Any]

MAX_MEMORY = "256Mi"
PYTHON = str(Path(sys.prefix) / "bin" / "python")
AGENT = f"{PYTHON} -m surefoot.agent --"
"""The host's image has no `surefoot-agent` on its PATH."""


def values(facts: Facts, changes: Values | None = None) -> Values:
    """`changes` is laid over the rest, mapping by mapping."""
    volumes, mounts = host_mounts(facts.host_prefix)
    repository, _, tag = layout.HOST_IMAGE.rpartition(":")
    image = {"repository": repository, "tag": tag, "pullPolicy": "Never"}
    # these very objects are the host's installation: nobody but its own user may read all of it
    mounted = {"extraVolumes": volumes, "extraVolumeMounts": mounts}
    return merged(
        {
            "operator": {
                "image": image,
                "command": [PYTHON, "-m", "surefoot_operator.controller"],
                "agentCommand": AGENT,
                "runtimeImage": layout.HOST_IMAGE,
                "extraEnv": host_environment(),
                "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "1Gi"}},
                **mounted,
            },
            "memoryTier": {
                "image": image,
                "maxMemory": MAX_MEMORY,
                "resources": {"requests": {"cpu": "10m"}},
                "companion": {
                    "command": [PYTHON, "-m", "surefoot.memory_server.sidecar"],
                    "extraEnv": host_environment(),
                    "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "512Mi"}},
                },
                **mounted,
            },
            "test": {"command": [PYTHON]},
        },
        changes or {},
    )


def merged(under: Values, over: Values) -> Values:
    """`over` wins; mappings in both are merged."""
    found = copy.deepcopy(under)
    for name, value in over.items():
        old = found.get(name)
        found[name] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else copy.deepcopy(value)
    return found
