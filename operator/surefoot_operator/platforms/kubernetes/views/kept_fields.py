"""Reduces API objects to the fields that anything here reads.

Pure; called by `cluster_cache` for whatever it lists, watches or learns. A worker's pod as the API server tells it takes 45 kB of
memory, most of it managedFields and the template that the job has too; ten thousand of them were half a gigabyte.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from sys import intern
from typing import Any

from surefoot_operator.api.spec import GROUP
from surefoot_operator.platforms.kubernetes import api_objects

Object = dict[str, Any]

_IDENTITY = (
    "name", "namespace", "uid", "resourceVersion", "creationTimestamp", "deletionTimestamp", "ownerReferences", "labels",
)  # fmt: skip
_CONDITION = ("type", "status", "reason", "message", "lastTransitionTime")
_POD_CONDITIONS = ("Ready", "PodScheduled", "DisruptionTarget")
_CONTAINER_STATUS = ("name", "state", "containerID")
_OF_MANY = frozenset(
    ("namespace", "creationTimestamp", "nodeName", "phase", "type", "status", "reason", "lastTransitionTime")
)
"""What thousands of objects have in common: each such text is kept once."""


def worker_pod(found: Object) -> Object:
    """Keeps what is read of a worker's pod."""
    kept = _pod(found, ("nodeName",))
    given = kept["metadata"].get("labels") or {}
    own = {intern(name): intern(value) for name, value in given.items() if name.startswith(GROUP)}
    kept["metadata"]["labels"] = own
    return kept


def holder_pod(found: Object) -> Object:
    """Keeps what is read of a holder's pod."""
    kept = _pod(found, ("nodeName", "containers"))
    if "containers" in kept["spec"]:
        kept["spec"]["containers"] = [_chosen(one, ("name", "ports")) for one in kept["spec"]["containers"]]
    annotations = found["metadata"].get("annotations") or {}
    if api_objects.HOLDER_TLS in annotations:
        kept["metadata"]["annotations"] = {api_objects.HOLDER_TLS: annotations[api_objects.HOLDER_TLS]}
    return kept


def node(found: Object) -> Object:
    """Keeps what is read of a node."""
    return {
        "metadata": _identity(found),
        "spec": _chosen(found.get("spec") or {}, ("taints", "unschedulable")),
        "status": _conditions(found.get("status") or {}),
    }


def lease(found: Object) -> Object:
    """Keeps which lease it is, and its last renewal."""
    return {"metadata": _identity(found), "spec": _chosen(found.get("spec") or {}, ("renewTime",))}


def whole(found: Object) -> Object:
    """Keeps everything but who wrote which field."""
    if "managedFields" not in found["metadata"]:
        return found
    metadata = {name: value for name, value in found["metadata"].items() if name != "managedFields"}
    return {**found, "metadata": metadata}


def _pod(found: Object, of_spec: Collection[str]) -> Object:
    status = found.get("status") or {}
    kept = {**_chosen(status, ("phase", "reason", "message", "podIP")), **_conditions(status, _POD_CONDITIONS)}
    for name in ("initContainerStatuses", "containerStatuses"):
        if name in status:
            kept[name] = [_chosen(one, _CONTAINER_STATUS) for one in status[name]]
    return {"metadata": _identity(found), "spec": _chosen(found.get("spec") or {}, of_spec), "status": kept}


def _conditions(status: Object, types: Collection[str] = ()) -> Object:
    """Those of these types, or all; without the moments that each heartbeat writes."""
    if "conditions" not in status:
        return {}
    wanted = (one for one in status["conditions"] if not types or one["type"] in types)
    return {"conditions": [_chosen(one, _CONDITION) for one in wanted]}


def _identity(found: Object) -> Object:
    return _chosen(found["metadata"], _IDENTITY)


def _chosen(found: Mapping[str, Any], names: Collection[str]) -> Object:
    return {
        name: intern(found[name]) if name in _OF_MANY and type(found[name]) is str else found[name]
        for name in names
        if name in found
    }
