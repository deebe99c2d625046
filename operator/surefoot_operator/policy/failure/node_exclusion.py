"""Excludes nodes on which one job fails repeatedly.

Pure; called by `plan`. A node may be bad for this job alone, with no signal of its own. The job vacates it by a
planned change, as it does for nodes that others mark.
"""

from __future__ import annotations

from collections import Counter

from surefoot_operator.api.status import ExcludedNode
from surefoot_operator.policy.facts import Facts
from surefoot_operator.policy.failure.losses import Loss

REPEATS = 2
"""So many failures on one node, within the budget's window, are no chance any more."""


def excluded(facts: Facts, loss: Loss) -> tuple[ExcludedNode, ...]:
    """Excluded nodes after this loss: newest last, within the job's limit."""
    policy = facts.spec.failure_policy
    kept = [e for e in facts.status.excluded_nodes if e.until_seconds > facts.now]
    if loss.node is not None:
        since = facts.now - policy.eval_period_seconds
        past = (i for i in facts.status.incidents if i.kind != "planned" and i.detected_seconds >= since)
        failures = Counter(i.node for i in past if i.node is not None)[loss.node] + 1
        if failures >= REPEATS:
            kept = [e for e in kept if e.name != loss.node]
            reason = f"{failures} failures of this job within {policy.eval_period_seconds:g} s, the last: {loss.reason}"
            kept.append(ExcludedNode(loss.node, reason, facts.now + policy.eval_period_seconds))
    most = policy.max_num_repeat_offenders_to_avoid
    return tuple(kept[-most:]) if most else ()
