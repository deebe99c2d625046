"""Translates node objects and kubelet leases into `NodeSeen`.

Pure; called by `cluster_views`, `cluster_cache` and `memory_tier_pods`. "Not ready" mostly means that the node controller did not
hear the kubelet; a fault of the controller or the API server looks the same. So a renewed lease outweighs it, and where
most nodes seem gone at once none counts as gone for that alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from surefoot_operator.api.known_node_signals import KNOWN_SIGNALS, NOT_OF_THE_NODE, SHOWN_SIGNALS
from surefoot_operator.api.spec import NodeSignals
from surefoot_operator.api.topology_levels import HOSTNAME, topology_path
from surefoot_operator.job_snapshot import NodeSeen
from surefoot_operator.platforms.kubernetes.views.leases import Heard

Object = dict[str, Any]

_OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
"""Only a person gives it, who knows that the node is down."""
_UNREACHABLE = "node.kubernetes.io/unreachable"
_MOST_SAID = 200
"""Characters of a condition's own words."""


def node(found: Object, heard: Heard, topology_key: str = HOSTNAME, signals: NodeSignals = KNOWN_SIGNALS) -> NodeSeen:
    """Translates one node; what its observer may have caused is a doubt.

    Copies are always kept on different nodes; `topology_key` is the highest level that they are spread over.
    """
    name, labels = found["metadata"]["name"], found["metadata"].get("labels") or {}
    down = _out_of_service(found)
    return NodeSeen(
        name=name,
        domain=labels.get(HOSTNAME, name),
        ready=not down,
        schedulable=not found["spec"].get("unschedulable", False),
        reason=down,
        signal=_signal(found, signals),
        remark=_signal(found, SHOWN_SIGNALS),
        doubt="" if down else _doubt(found, name in heard.renewed) or _unrenewed(name, heard),
        path=topology_path(labels, topology_key),
    )


def without_mass_doubt(nodes: Iterable[NodeSeen]) -> tuple[NodeSeen, ...]:
    """Confirms doubts, unless most nodes seem gone at once.

    Then the observer is the likelier fault. What is confirmed stays a doubt, too: an observer that was away hears the nodes
    again one after another, and the last of them seems gone among others that are well.
    """
    found = tuple(nodes)
    seem_gone = sum(not one.ready or bool(one.doubt) for one in found)
    if 2 * seem_gone > len(found):
        return found
    return tuple(replace(one, ready=False) if one.doubt else one for one in found)


def is_contradicted(found: Object) -> bool:
    """Whether the kubelet's lease renewals outweigh this node's conditions."""
    return _doubt(found, renewed=False) != _doubt(found, renewed=True)


def is_left(found: Object) -> bool:
    """Whether a node is cordoned, or marked to be left."""
    return bool(found.get("spec", {}).get("unschedulable", False)) or bool(_signal(found, KNOWN_SIGNALS))


def marks(found: Object) -> tuple[Any, ...]:
    """The parts of a node that plans read; heartbeats are left out."""
    metadata, spec = found["metadata"], found["spec"]
    conditions = [(c["type"], c["status"], c.get("reason")) for c in found.get("status", {}).get("conditions", ())]
    return metadata["uid"], metadata.get("labels"), spec.get("taints"), spec.get("unschedulable"), conditions


def _out_of_service(found: Object) -> str:
    taints = {taint["key"] for taint in found["spec"].get("taints", ())}
    return f"it has the taint {_OUT_OF_SERVICE}" if _OUT_OF_SERVICE in taints else ""


def _unrenewed(name: str, heard: Heard) -> str:
    return "its kubelet has not renewed its lease" if name in heard.silent else ""


def _doubt(found: Object, renewed: bool) -> str:
    taints = {taint["key"] for taint in found["spec"].get("taints", ())}
    ready: Object | None = next(
        (c for c in found.get("status", {}).get("conditions", ()) if c["type"] == "Ready"), None
    )
    if ready is not None and ready["status"] == "False":
        return f"not ready: {ready.get('message', '')}"
    if renewed and ready is not None:
        return ""  # whoever says that it is unknown has not heard what we have
    if _UNREACHABLE in taints:
        return f"it has the taint {_UNREACHABLE}"
    if ready is None:
        return "its condition Ready is not set yet"
    return "" if ready["status"] == "True" else f"not ready: {ready.get('message', '')}"


def _signal(found: Object, signals: NodeSignals) -> str:
    """The first that it bears, as a sentence."""
    taints = {taint["key"] for taint in found["spec"].get("taints", ())}
    labelled = {f"{key}={value}" for key, value in (found["metadata"].get("labels") or {}).items()}
    excepted = NOT_OF_THE_NODE if signals is KNOWN_SIGNALS else {}
    conditions = found.get("status", {}).get("conditions", ())
    stated = {f"{c['type']}={c['status']}": c for c in conditions if c.get("reason") not in excepted.get(c["type"], ())}
    for kind, wanted, borne in (
        ("taint", signals.taints, taints),
        ("label", signals.labels, labelled),
        ("condition", signals.conditions, stated),
    ):
        there = next((name for name in wanted if name in borne), None)
        if there is not None:
            return f"it has the {kind} {there}{_said(stated.get(there, {}))}"
    return ""


def _said(condition: Object) -> str:
    """Why a condition's writer set it, in its own words."""
    reason, message = condition.get("reason") or "", (condition.get("message") or "").strip()
    told = ": ".join(part for part in (reason, message) if part)
    return f" ({told[:_MOST_SAID]})" if told else ""
