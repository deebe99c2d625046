"""TrainingJobs, pods and nodes as an API server stores them, for whoever looks at them as a person does."""

from __future__ import annotations

from typing import Any

from surefoot_operator.api.status import JobStatus
from surefoot_operator.cli.jobs.read_jobs import JobView, stored_job
from surefoot_operator.cli.local.run_event import RunEvent
from surefoot_operator.job_snapshot import JobSnapshot
from surefoot_operator.platforms.kubernetes.api_writes import add_printer_columns

Object = dict[str, Any]

SPEC: Object = {"replicas": 3, "template": {"spec": {"containers": [{"name": "trainer", "command": ["a"]}]}}}


def stored_document(status: Object | None = None, name: str = "gpt", **metadata: Any) -> Object:
    body: Object = {
        "apiVersion": "surefoot.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": "team", "uid": "uid-1", "generation": 1, **metadata},
        "spec": SPEC,
    }
    return body if status is None else {**body, "status": status}


def written(status: JobStatus, seen: JobSnapshot, **metadata: Any) -> Object:
    """The job as the operator leaves it: with the columns that a cluster's fabric adds."""
    document = stored_document({}, **metadata)
    return {**document, "status": add_printer_columns(status, seen.workers, document, seen.now_seconds)}


def view_of_snapshot(seen: JobSnapshot, *events: RunEvent, **metadata: Any) -> JobView:
    """What a person sees of the snapshot that an operator plans from."""
    return JobView(
        now=seen.now_seconds,
        stored=stored_job(written(seen.status, seen, **metadata)),
        workers=seen.workers,
        nodes=seen.nodes,
        servers={one.endpoint.instance.node: one.state == "Ready" for one in seen.servers},
        events=events,
    )


def worker_pod(index: int, node: str | None = "n0", attempt: int = 1, uid: str = "uid-1") -> Object:
    owner = {
        "apiVersion": "surefoot.dev/v1alpha1",
        "kind": "TrainingJob",
        "name": "gpt",
        "uid": uid,
        "controller": True,
    }
    labels = {"worker-index": str(index), "attempt": str(attempt), "job-uid": uid, "part": "worker"}
    return {
        "metadata": {
            "name": f"gpt-worker-{index}-{attempt}",
            "namespace": "team",
            "uid": f"pod-{index}-{attempt}",
            "labels": {f"surefoot.dev/{name}": value for name, value in labels.items()},
            "ownerReferences": [owner],
        },
        "spec": {"containers": [{"name": "trainer"}], **({"nodeName": node} if node else {})},
        "status": {"phase": "Running", "containerStatuses": [{"name": "trainer", "state": {"running": {}}}]},
    }


def node_object(name: str, **spec: Any) -> Object:
    return {
        "metadata": {"name": name, "labels": {}},
        "spec": spec,
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }
