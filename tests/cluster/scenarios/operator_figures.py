"""What an operator's pod says of itself by its metrics: CPU, memory, how late its loop was. Reads through the API server."""

from __future__ import annotations

import math
import os
import re
from typing import Any

from cluster.api import Api
from cluster.scenarios.installed import NAMESPACE

_LAG = re.compile(r'^surefoot_operator_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)$', re.MULTILINE)


def metrics_of(api: Api, pod: str) -> str:
    return str(api.call("GET", f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}:8080/proxy/metrics"))


def figures(text: str) -> dict[str, Any]:
    return {
        "rss_mib": round(figure(text, "process_resident_memory_bytes") / 2**20, 1),
        "cpu_seconds": figure(text, "process_cpu_seconds_total"),
        "loop_lag_below_seconds": longest_lag(text),
    }


def figure(text: str, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    assert found is not None, f"the operator has no {name}"
    return float(found[1])


def longest_lag(text: str) -> float | None:
    """The bound of the highest bucket that has anything in it; None: beyond the last."""
    buckets = [(float(m[1]), float(m[2])) for m in _LAG.finditer(text)]
    whole = buckets[-1][1]
    bound = next(limit for limit, count in buckets if count >= whole)
    return None if math.isinf(bound) else bound


def machine_load() -> dict[str, float]:
    return {"load": round(os.getloadavg()[0], 1)}
