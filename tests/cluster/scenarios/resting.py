"""What the operator costs and how fast it asks: a hundred suspended jobs, three hundred pods that no node will run."""

from __future__ import annotations

import re
import time
from typing import Any

from cluster.scenarios.api_calls import api_calls, since
from cluster.scenarios.installed import NAMESPACE
from cluster.scenarios.job import Job
from cluster.scenarios.shapes import FIXED, Shape
from cluster.scenarios.stage import Stage

JOBS = 100
PODS = 300
SETTLE_SECONDS = 20.0
MEASURE_SECONDS = 60.0


def pods_asked(stage: Stage) -> dict[str, Any]:
    """From the moment that the job was applied, and from the first pod to the last; as the watch hears of them."""
    nowhere = {"nodeSelector": {"surefoot.test/no-such": "node"}}
    job = stage.job("many", Shape(PODS), pod=nowhere, persistent_interval=None)
    job.wait(f"{PODS} pods", lambda: len(job.pods()) == PODS)
    heard = sorted(one.at for one in job.pods_made(job.began))
    stage.remove(job)
    return {
        "pods": len(heard),
        "first_to_last_seconds": round(heard[-1] - heard[0], 3),
        "applied_to_last_seconds": round(heard[-1] - job.began, 3),
    }


def at_rest(stage: Stage) -> dict[str, Any]:
    """CPU, memory and API calls of the leading operator while a hundred jobs are suspended and nothing happens."""
    jobs: list[Job] = []
    for _ in range(JOBS):
        jobs.append(stage.job("resting", FIXED, spec={"suspend": True}))
    for job in jobs:
        job.wait("it is suspended", lambda j=job: j.status.phase == "Suspended")  # type: ignore[misc]
    _pass(SETTLE_SECONDS)
    before, calls, at = _figures(stage), api_calls(), time.time()
    _pass(MEASURE_SECONDS)
    after, minutes = _figures(stage), (time.time() - at) / 60
    found = {
        "jobs": JOBS,
        "cpu_cores": round(
            (after["process_cpu_seconds_total"] - before["process_cpu_seconds_total"]) / minutes / 60, 4
        ),
        "rss_mib": round(after["process_resident_memory_bytes"] / 2**20, 1),
        "api_calls_per_minute": {what: round(n / minutes, 1) for what, n in sorted(since(api_calls(), calls).items())},
    }
    for job in jobs:
        job.delete()
    for job in jobs:
        stage.remove(job)
    return found


def _pass(seconds: float) -> None:
    time.sleep(seconds)  # what is measured is that nothing happens


def _figures(stage: Stage) -> dict[str, float]:
    """The leader's own metrics, through the API server: pod addresses may not be ours to reach."""
    pod = stage.installed.leader()
    assert pod is not None
    name = pod["metadata"]["name"]
    text = stage.installed.api.call("GET", f"/api/v1/namespaces/{NAMESPACE}/pods/{name}:8080/proxy/metrics")
    return {found[1]: float(found[2]) for found in re.finditer(r"^(process_\w+) (\S+)$", text, re.MULTILINE)}
