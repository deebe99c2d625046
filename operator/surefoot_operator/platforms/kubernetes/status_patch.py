"""Builds the JSON Patch that compares and swaps a job's status.

Pure; called by `platform`. It tests our own serial and the world's epoch and state, not resourceVersion: an
edited label or spec does not invalidate a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from surefoot_operator.api.status import JobStatus, Stamp
from surefoot_operator.api.status_json import status_to_json
from surefoot_operator.job_snapshot import WorkerSeen
from surefoot_operator.platforms.kubernetes import api_objects

Object = dict[str, Any]


_NOTHING = Stamp(0, None, None)
"""Of a job that nobody has written to."""


def stored_stamp(stored: Object) -> Stamp:
    """The stamp of a job as stored."""
    found = stored.get("status") or {}
    world = found.get("world") or {}
    return Stamp(found.get("serial", 0), world.get("epoch"), world.get("state"))


def operations(stored: Object, body: Object, test: Stamp) -> list[Object]:
    """Builds the patch that replaces the status if its stamp matches.

    `stored`: the job as last read.
    """
    tests = [_test("/metadata/uid", stored["metadata"]["uid"])]
    # a missing member equals null; the mapping around it must be there
    if "status" not in stored and test == _NOTHING:
        tests.append(_test("/status", None))
    else:
        tests.append(_test("/status/serial", test.serial or None))
        if test.epoch is None:
            tests.append(_test("/status/world", None))
        else:
            tests += [_test("/status/world/epoch", test.epoch), _test("/status/world/state", test.state)]
    return [*tests, {"op": "add", "path": "/status", "value": body}]


def _test(path: str, value: Any) -> Object:
    return {"op": "test", "path": path, "value": value}


def shown(new: JobStatus, workers: Sequence[WorkerSeen], stored: Object, now: float) -> Object:
    """Adds to the status what columns and autoscalers read.

    `now` in Unix seconds.
    """
    body = status_to_json(new)
    old = stored.get("status", {})
    wanted, spares = stored["spec"].get("replicas", 1), stored["spec"].get("spares", 0)
    ready = sum(worker.phase == "Running" and not worker.deleting for worker in workers)
    live = sum(worker.phase not in ("Succeeded", "Failed") for worker in workers)
    # an autoscaler compares these with `replicas`, which counts no spares
    ready, live = (count - min(spares, max(0, count - wanted)) for count in (ready, live))
    body |= {
        # at their defaults too: a column without a value looks like a job that nobody looks after
        "phase": new.phase,
        "step": new.step,
        "restarts": new.restarts,
        "replicas": live,
        "readyReplicas": ready,
        "ready": f"{ready}/{wanted}",
        "selector": api_objects.selector(stored["metadata"]["uid"]),
    }
    if new.last_complete is not None:
        same = old.get("lastComplete") == body["lastComplete"] and "checkpointTime" in old
        body["checkpointTime"] = old["checkpointTime"] if same else timestamp(now)
    return body


def timestamp(now: float) -> str:
    """Formats Unix seconds as a Kubernetes time."""
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
