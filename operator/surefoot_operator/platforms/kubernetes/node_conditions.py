"""Decides what is written on sick nodes, and for how long.

Pure; called by `shard_leadership`. Without it each job would have to lose a step or a trainer of its own on a node that
another one has found to be sick, and whoever repairs nodes would hear of none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from surefoot_operator.api.spec import GROUP
from surefoot_operator.api.status import moment_seconds
from surefoot_operator.platforms.kubernetes.api_writes import timestamp

Object = dict[str, Any]

CONDITION = "SurefootUnhealthy"
MARK = f"{GROUP}/unhealthy"
"""Annotation, and taint where one is wanted: for whoever repairs nodes."""

MAX_SHARE = 0.1
"""Of the cluster's nodes, and one at least: what more agents say at once is no reason to empty a cluster."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Why a node is called unhealthy, until when."""

    reason: str
    message: str
    until_seconds: float


@dataclass(frozen=True, slots=True)
class NodeWrites:
    """Strategic merges for a node's status and its taint.

    None: nothing to write.
    """

    status: Object | None = None
    taint: Object | None = None


def reports_by_node(
    jobs: Iterable[Object], nodes: Mapping[str, Object], now: float
) -> tuple[dict[str, NodeReport], list[str]]:
    """Returns reports by node, and the nodes beyond the limit."""
    found: dict[str, NodeReport] = {}
    for job in jobs:
        metadata = job["metadata"]
        for one in (job.get("status") or {}).get("unhealthyNodes") or ():
            name, until = one.get("name"), moment_seconds(one.get("untilTime")) or 0.0
            if name not in nodes or until <= now or (name in found and found[name].until_seconds >= until):
                continue
            reason, _, text = str(one.get("reason", "")).partition(": ")
            reason = reason if reason.isalnum() else "FoundSick"
            message = f"{text or reason}; found by an agent of job {metadata['namespace']}/{metadata['name']}"
            found[name] = NodeReport(reason, message, until)
    most = max(1, int(MAX_SHARE * len(nodes)))
    ordered = sorted(found, key=lambda name: (not _is_marked(nodes[name]), name))
    return {name: found[name] for name in ordered[:most]}, ordered[most:]


def node_writes(node: Object, report: NodeReport | None, taint_effect: str, now: float) -> NodeWrites:
    """Compares a node with its report.

    Args:
        node: As the API server has it.
        report: None: nothing is wrong with it any more.
        taint_effect: Of the taint; empty: taints are left alone.
        now: Unix seconds, written as the condition's time.
    """
    told = _condition(node)
    wanted = ("True", report.reason, report.message) if report is not None else ("False", "NothingFound", "")
    stands = (told.get("status"), told.get("reason"), told.get("message", ""))
    status: Object | None = None
    if (report is not None or told) and stands != wanted:
        at = timestamp(now)
        since = at if told.get("status") != wanted[0] else told.get("lastTransitionTime", at)
        named = dict(zip(("status", "reason", "message"), wanted, strict=True))
        condition = {"type": CONDITION, **named, "lastHeartbeatTime": at, "lastTransitionTime": since}
        mark = f"{report.reason}: {report.message}" if report is not None else None
        status = {"metadata": {"annotations": {MARK: mark}}, "status": {"conditions": [condition]}}
    return NodeWrites(status, _taint(node, report, taint_effect) if taint_effect else None)


def _taint(node: Object, report: NodeReport | None, effect: str) -> Object | None:
    """The whole list, of the node's version: the API server merges no taints, and a stale list would undo others' words."""
    taints = node["spec"].get("taints") or []
    others = [taint for taint in taints if taint["key"] != MARK]
    if report is not None and effect not in [taint["effect"] for taint in taints if taint["key"] == MARK]:
        others.append({"key": MARK, "value": report.reason, "effect": effect})
    elif report is not None or len(others) == len(taints):
        return None
    return {"metadata": {"resourceVersion": node["metadata"]["resourceVersion"]}, "spec": {"taints": others}}


def _condition(node: Object) -> Object:
    conditions: list[Object] = node.get("status", {}).get("conditions") or []
    return next((one for one in conditions if one["type"] == CONDITION), {})


def _is_marked(node: Object) -> bool:
    return bool(_condition(node).get("status") == "True")
