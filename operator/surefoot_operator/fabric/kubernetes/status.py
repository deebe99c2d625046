"""A job's status as JSON Patch: the whole of it, under a test of the world. Pure; called by `fabric`.

The test is on the world's epoch and state, not on resourceVersion: writes of progress must not fail the fence.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from surefoot_operator.api.spec import TrainingJob
from surefoot_operator.api.status import JobStatus, World
from surefoot_operator.api.status_json import status_to_json
from surefoot_operator.fabric.kubernetes import labels
from surefoot_operator.observed import WorkerSeen

Object = dict[str, Any]
Fence = tuple[int, str] | None


def fence(world: World | None) -> Fence:
    """What a patch tests."""
    return None if world is None else (world.epoch, world.state)


def stored_fence(stored: Object) -> Fence:
    """The same, of a job as the API gives it."""
    world = stored.get("status", {}).get("world")
    return None if world is None else (world["epoch"], world["state"])


def operations(stored: Object, body: Object, test: Fence) -> list[Object]:
    """Replaces the status of exactly this job if its world is as tested. `stored`: as it was last seen."""
    tests = [_test("/metadata/uid", stored["metadata"]["uid"])]
    if test is not None:
        tests += [_test("/status/world/epoch", test[0]), _test("/status/world/state", test[1])]
    else:
        # a missing member equals null; the mapping around it must be there
        tests.append(_test("/status/world" if "status" in stored else "/status", None))
    return [*tests, {"op": "add", "path": "/status", "value": body}]


def _test(path: str, value: Any) -> Object:
    return {"op": "test", "path": path, "value": value}


def shown(job: TrainingJob, new: JobStatus, workers: Sequence[WorkerSeen], stored: Object, now: float) -> Object:
    """The status with what people and autoscalers read beside it; `now` in Unix seconds."""
    body = status_to_json(new)
    old = stored.get("status", {})
    ready = sum(worker.phase == "Running" and not worker.deleting for worker in workers)
    body |= {
        "replicas": sum(worker.phase not in ("Succeeded", "Failed") for worker in workers),
        "readyReplicas": ready,
        "ready": f"{ready}/{job.spec.replicas}",
        "selector": labels.selector(job.uid),
    }
    if new.last_complete is not None:
        same = old.get("lastComplete") == body["lastComplete"] and "checkpointTime" in old
        body["checkpointTime"] = old["checkpointTime"] if same else timestamp(now)
    for condition in body.get("conditions", ()):
        condition["lastTransitionTime"] = timestamp(condition["lastTransitionSeconds"])
    return body


def timestamp(now: float) -> str:
    """Unix seconds as Kubernetes writes a time."""
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
