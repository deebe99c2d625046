"""Tracks which checkpoint later steps have shown to be good.

Pure; called by `maintenance_plan` and `upload_plan`. The newest checkpoint may already contain the cause of a NaN loss a few
steps later: without an older one that is known good, and kept, a rollback would have no target.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from surefoot.protocol.checkpoints.completeness import complete_in_persistent_tier
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.checkpoints.retention import (
    anomalous_checkpoints,
    find_known_good,
    last_checkpoint_before_anomaly,
)
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.policy.core.facts import (
    MembershipFacts,
    MembershipTierFacts,
    is_responsive,
    unreadable_checkpoints,
    worker_id,
)
from surefoot_operator.policy.failure.loss_anomalies import summarize_loss_history
from surefoot_operator.policy.membership.restore_decisions import DROP_SECONDS, may_drops_be_in_progress


def find_last_good(
    facts: MembershipTierFacts, complete: Sequence[Checkpoint], manifests: Iterable[RankManifest]
) -> Checkpoint | None:
    """Returns the newest known good checkpoint of both tiers; None: none is known.

    Args:
        facts: The job's facts.
        complete: Complete checkpoints in memory on the present lineage, without those that are being dropped.
        manifests: The manifests read from memory.
    """
    history = summarize_loss_history(facts)
    if history is None:
        return None
    persistent, generation = facts.persistent, facts.membership.generation
    persistent_entries = (
        (persistent.entries or ())
        if persistent.read_generation == generation and not may_drops_be_in_progress(facts)
        else ()
    )
    uploaded = complete_in_persistent_tier(
        persistent_entries, facts.status.lineage, generation, unreadable_checkpoints(facts), facts.layout_covers
    )
    anomalous = anomalous_checkpoints(manifests) | anomalous_checkpoints(persistent_entries)
    return find_known_good((*complete, *uploaded), anomalous, history, facts.status.last_good)[0]


def checkpoints_kept_for_rollback(
    facts: MembershipFacts, complete: Sequence[Checkpoint], manifests: Sequence[RankManifest]
) -> frozenset[Checkpoint]:
    """Returns the checkpoints that one tier keeps for a rollback although newer ones are complete.

    Args:
        facts: The job's facts.
        complete: Complete checkpoints of that tier on the present lineage.
        manifests: The manifests read from that tier.
    """
    newest_good, history = last_checkpoint_before_anomaly(complete, manifests), summarize_loss_history(facts)
    required = frozenset() if newest_good is None else frozenset({newest_good})
    if history is None:
        return required
    return required | find_known_good(complete, anomalous_checkpoints(manifests), history, facts.status.last_good)[1]


def checkpoints_kept_in_memory_for_rollback(
    facts: MembershipFacts, complete: Sequence[Checkpoint], manifests: Sequence[RankManifest]
) -> frozenset[Checkpoint]:
    """Returns the checkpoints that the memory tier keeps for a rollback although newer ones are complete.

    These are those of `kept_for_rollback`, and all without an anomalous loss while an agent may drop saves too.
    """
    required = checkpoints_kept_for_rollback(facts, complete, manifests)
    if _gc_owner_drops_nothing(facts) or summarize_loss_history(facts) is None:
        return required
    return required | frozenset(complete).difference(anomalous_checkpoints(manifests))


def _gc_owner_drops_nothing(facts: MembershipFacts) -> bool:
    """Whether the GC owner, the first member's agent, drops nothing, because it is connected.

    It knows later steps than this operator, so its last good checkpoint may be another one. Each would then drop the checkpoint
    that the other keeps.
    """
    first_member = next(iter(facts.membership.members), None)
    session = facts.sessions.get(worker_id(first_member)) if first_member is not None else None
    if first_member is None or session is None or session.incarnation != first_member.incarnation:
        return first_member is None
    return is_responsive(facts, session) and facts.now >= session.since_seconds + DROP_SECONDS
