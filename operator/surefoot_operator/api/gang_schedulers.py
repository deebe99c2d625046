"""Describes the gang schedulers that place a job's workers.

Pure; read by `spec_limits` and the Kubernetes fabric. Each reads a PodGroup of its own API, and finds a pod's group by a mark of its own:
a pod with the other one's mark is a pod without a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from surefoot_operator.api.spec import Gang


@dataclass(frozen=True, slots=True)
class GangScheduler:
    """One gang scheduler's API, and its mark on pods."""

    api_version: str
    """Of its PodGroup."""
    scheduler_name: str
    """Under which it is installed by its own chart."""
    marked_in: Literal["labels", "annotations"]
    mark: str
    """Key of a pod's label or annotation; the value is the group's name."""


GANG_SCHEDULERS: Mapping[Gang, GangScheduler] = {
    "Volcano": GangScheduler("scheduling.volcano.sh/v1beta1", "volcano", "annotations", "scheduling.k8s.io/group-name"),
    "Coscheduling": GangScheduler(
        "scheduling.x-k8s.io/v1alpha1", "scheduler-plugins-scheduler", "labels", "scheduling.x-k8s.io/pod-group"
    ),
}


def marks_of(template: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Lists (path, key) of marks that a pod template bears itself."""
    metadata = template.get("metadata") or {}
    return [
        (f"metadata.{one.marked_in}", one.mark)
        for one in GANG_SCHEDULERS.values()
        if one.mark in (metadata.get(one.marked_in) or {})
    ]
