"""Decides which condition, annotation and taint unhealthy nodes get, and for how long.

Pure; called by `shard_leadership`. Without these marks, every job would have to lose a step or a trainer of its own on
a node that another job has found unhealthy, and tools that repair nodes would not learn of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from surefoot_operator.api.spec import GROUP
from surefoot_operator.api.status import parse_rfc3339
from surefoot_operator.platforms.kubernetes.api_writes import format_time

Object = dict[str, Any]

CONDITION_TYPE = "SurefootUnhealthy"
"""Type of the node condition."""
UNHEALTHY_KEY = f"{GROUP}/unhealthy"
"""Key of the annotation, and of the optional taint, by which repair tools find unhealthy nodes."""

MAX_MARKED_RATIO = 0.1
"""Part of the cluster's nodes that may be marked at once, at least one node: wrong reports must not empty a cluster."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Why a node is reported as unhealthy, and until when."""

    reason: str
    """CamelCase reason for the node's condition."""
    message: str
    """Finding of the agent, with the job that reported it."""
    until_seconds: float
    """Unix time at which the report expires."""


@dataclass(frozen=True, slots=True)
class NodePatches:
    """Strategic merge patches for a node."""

    status: Object | None = None
    """Patch of the condition and the annotation; None: nothing to write."""
    taint: Object | None = None
    """Patch of the taints; None: nothing to write."""


def collect_reports(
    jobs: Iterable[Object], nodes: Mapping[str, Object], now: float
) -> tuple[dict[str, NodeReport], list[str]]:
    """Collects the jobs' reports of unhealthy nodes.

    Args:
        jobs: All TrainingJobs as stored.
        nodes: All nodes by name.
        now: Unix time, in seconds.

    Returns:
        The report that lasts longest for each node that may be marked, and the names of reported nodes beyond the
        limit.
    """
    reports: dict[str, NodeReport] = {}
    for job in jobs:
        metadata = job["metadata"]
        for entry in (job.get("status") or {}).get("unhealthyNodes") or ():
            name, until_seconds = entry.get("name"), parse_rfc3339(entry.get("untilTime")) or 0.0
            if (
                name not in nodes
                or until_seconds <= now
                or (name in reports and reports[name].until_seconds >= until_seconds)
            ):
                continue
            reason, _, text = str(entry.get("reason", "")).partition(": ")
            reason = reason if reason.isalnum() else "UnhealthyNode"
            message = f"{text or reason}; found by an agent of job {metadata['namespace']}/{metadata['name']}"
            reports[name] = NodeReport(reason, message, until_seconds)
    max_nodes = max(1, int(MAX_MARKED_RATIO * len(nodes)))
    names = sorted(reports, key=lambda name: (not _is_marked(nodes[name]), name))
    return {name: reports[name] for name in names[:max_nodes]}, names[max_nodes:]


def build_node_patches(node: Object, report: NodeReport | None, taint_effect: str, now: float) -> NodePatches:
    """Compares a node with its report and builds the patches that mark or unmark it.

    Args:
        node: The node as stored.
        report: Why it is unhealthy; None: it is not reported now.
        taint_effect: Effect of the taint; empty: taints are not changed.
        now: Unix time, in seconds; becomes the condition's time.
    """
    old_condition = _find_condition(node)
    new_values = ("True", report.reason, report.message) if report is not None else ("False", "NothingFound", "")
    old_values = (old_condition.get("status"), old_condition.get("reason"), old_condition.get("message", ""))
    status: Object | None = None
    if (report is not None or old_condition) and old_values != new_values:
        time_text = format_time(now)
        transition_time = (
            time_text
            if old_condition.get("status") != new_values[0]
            else old_condition.get("lastTransitionTime", time_text)
        )
        new_fields = dict(zip(("status", "reason", "message"), new_values, strict=True))
        condition = {
            "type": CONDITION_TYPE,
            **new_fields,
            "lastHeartbeatTime": time_text,
            "lastTransitionTime": transition_time,
        }
        annotation = f"{report.reason}: {report.message}" if report is not None else None
        status = {"metadata": {"annotations": {UNHEALTHY_KEY: annotation}}, "status": {"conditions": [condition]}}
    return NodePatches(status, _build_taint_patch(node, report, taint_effect) if taint_effect else None)


def _build_taint_patch(node: Object, report: NodeReport | None, effect: str) -> Object | None:
    """Builds the patch of a node's taints; None: nothing to write.

    It has all taints and the node's resourceVersion: the API server does not merge taints, and an outdated list would
    undo changes by others.
    """
    taints = node["spec"].get("taints") or []
    others = [taint for taint in taints if taint["key"] != UNHEALTHY_KEY]
    if report is not None and effect not in [taint["effect"] for taint in taints if taint["key"] == UNHEALTHY_KEY]:
        others.append({"key": UNHEALTHY_KEY, "value": report.reason, "effect": effect})
    elif report is not None or len(others) == len(taints):
        return None
    return {"metadata": {"resourceVersion": node["metadata"]["resourceVersion"]}, "spec": {"taints": others}}


def _find_condition(node: Object) -> Object:
    conditions: list[Object] = node.get("status", {}).get("conditions") or []
    return next((condition for condition in conditions if condition["type"] == CONDITION_TYPE), {})


def _is_marked(node: Object) -> bool:
    return bool(_find_condition(node).get("status") == "True")
