"""Rules of what ends a job and what does not: a kubelet's trouble never, and nothing before the newest checkpoint is stored."""

from __future__ import annotations

from dataclasses import replace

from simulator.mutations.mutation import ROUGH, Mutation, constant
from surefoot_operator.policy.core.facts import Facts
from surefoot_operator.policy.membership import final_checkpoint
from surefoot_operator.policy.planning import plan

UNSTARTED = replace(ROUGH, least_workers=3, steps=60, faults=10, fault_span_seconds=6.0,
                    kinds=("workers cannot be started", "agent dies"))  # fmt: skip
OVERDUE = replace(
    ROUGH, steps=2000, persistent_interval=100, faults=2, kinds=("trainer dies", "operator dies"), active_deadline_seconds=9.0
)  # fmt: skip

MOST_ROUNDS = 1


def _impatient(facts: Facts) -> str | None:
    """What the kubelet cannot start counts as what the program did."""
    worn = facts.status.failed_starts >= MOST_ROUNDS and any(w.start_blocker for w in facts.snapshot.workers)
    return "start failures used up backoffLimit" if worn else None


ENDING = (
    Mutation("start failures use up backoffLimit", patches=((plan, "describe_start_failure", _impatient),), settings=UNSTARTED),
    Mutation("a job ends before its newest checkpoint is stored", patches=((final_checkpoint, "upload_before_failing", constant(None)),),
             settings=OVERDUE),
)  # fmt: skip
