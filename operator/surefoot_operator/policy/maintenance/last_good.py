"""Tracks which checkpoint later steps have proven to be good.

Pure; called by `maintenance_plan` and `upload_plan`. The newest checkpoint may hold what makes the next loss NaN: without
one that is proven, and kept, there would be nothing to go back to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from surefoot.protocol.checkpoints.completeness import complete_persistent
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.checkpoints.retention import anomalous_checkpoints, last_good, last_good_and_required
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.policy.core.facts import (
    WorldFacts,
    WorldTierFacts,
    is_responsive,
    unreadable_checkpoints,
    worker_id,
)
from surefoot_operator.policy.failure.loss_anomalies import sound_steps
from surefoot_operator.policy.membership.restore_decisions import DROP_SECONDS, may_be_under_way


def newest_good(
    facts: WorldTierFacts, complete: Sequence[Checkpoint], manifests: Iterable[RankManifest]
) -> Checkpoint | None:
    """The newest good checkpoint of both tiers.

    Args:
        complete: Of the present lineage, in memory, without those that are being dropped.
        manifests: Those that were read there.
    """
    sound = sound_steps(facts)
    if sound is None:
        return None
    persistent, generation = facts.persistent, facts.membership.generation
    listed = (
        (persistent.entries or ()) if persistent.read_generation == generation and not may_be_under_way(facts) else ()
    )
    kept = complete_persistent(listed, facts.status.lineage, generation, unreadable_checkpoints(facts), facts.covers)
    suspect = anomalous_checkpoints(manifests) | anomalous_checkpoints(listed)
    return last_good_and_required((*complete, *kept), suspect, sound, facts.status.last_good)[0]


def kept_for_rollback(
    facts: WorldFacts, complete: Sequence[Checkpoint], manifests: Sequence[RankManifest]
) -> frozenset[Checkpoint]:
    """What one tier keeps although newer ones are complete.

    Args:
        complete: Of the present lineage, in that tier.
        manifests: Those that were read there.
    """
    before, sound = last_good(complete, manifests), sound_steps(facts)
    kept = frozenset() if before is None else frozenset({before})
    if sound is None:
        return kept
    return kept | last_good_and_required(complete, anomalous_checkpoints(manifests), sound, facts.status.last_good)[1]


def kept_in_memory_for_rollback(
    facts: WorldFacts, complete: Sequence[Checkpoint], manifests: Sequence[RankManifest]
) -> frozenset[Checkpoint]:
    """What the memory tier keeps although newer ones are complete.

    As `spared`, and all that is not suspect while an agent may drop there, too.
    """
    kept = kept_for_rollback(facts, complete, manifests)
    if _gc_owner_is_disconnected(facts) or sound_steps(facts) is None:
        return kept
    return kept | frozenset(complete).difference(anomalous_checkpoints(manifests))


def _gc_owner_is_disconnected(facts: WorldFacts) -> bool:
    """Whether the first member's agent drops nothing, as its line stands: without one it keeps house itself.

    It knows of later steps than are told here, and by them drops what counts as the last good one here, which drops what
    counts as that there.
    """
    first = next(iter(facts.membership.members), None)
    session = facts.sessions.get(worker_id(first)) if first is not None else None
    if first is None or session is None or session.incarnation != first.incarnation:
        return first is None
    return is_responsive(facts, session) and facts.now >= session.since_seconds + DROP_SECONDS
