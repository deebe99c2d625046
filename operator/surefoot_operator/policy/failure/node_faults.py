"""Tells a program's failures from those of its node.

Pure; called by `failure_detection`. A rank that a node killed by its own trouble ends like one with a fault of its own: it would use
up the budget of a program that did nothing, and nobody would look at the node.
"""

from __future__ import annotations

from dataclasses import replace

from surefoot_operator.job_snapshot import ExitSeen, WorkerSeen
from surefoot_operator.policy.core.facts import Facts
from surefoot_operator.policy.failure.losses import Loss
from surefoot_operator.policy.failure.unhealthy_nodes import found_sick


def weighed(facts: Facts, loss: Loss, told: ExitSeen) -> Loss:
    """Blames the node, not the program, where that is evident.

    What comes again without a new step counts all the same: a program without a memory limit may fill a node.
    """
    sick = found_sick(facts).get(loss.node) if loss.node is not None else None
    if sick is not None:
        return replace(loss, reason=f"{loss.reason}; its node is sick: {sick}", application=False, unexplained=True)
    if told.oom != "node":
        return loss
    loss = replace(loss, application=False, unexplained=True)
    # with a limit for the whole pod the container's own counters do not tell that limit from the node's memory
    return replace(loss, node=None) if _has_pod_limit(facts) else loss


def container_killed(loss: Loss, worker: WorkerSeen | None) -> Loss:
    """Names the OOM killer where it ended a worker's whole container.

    Whose limit it was its fabric does not know: it counts only where it comes again without a new step.
    """
    if worker is None or not worker.out_of_memory:
        return loss
    reason = (
        f"the kernel's OOM killer ended the container of worker {worker.index} (OOMKilled): its memory limit, or the memory of"
        f" node {worker.node}, was used up; raise resources.limits.memory, or use less a rank"
    )
    return replace(loss, reason=reason, unexplained=True)


def _has_pod_limit(facts: Facts) -> bool:
    limits = facts.spec.template.raw.get("spec", {}).get("resources", {}).get("limits", {})
    return "memory" in limits
