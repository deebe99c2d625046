"""Tracks which checkpoint later steps have proven to be good.

Pure; called by `maintenance_plan` and `upload_plan`. The newest checkpoint may hold what makes the next loss NaN: without
one that is proven, and kept, there would be nothing to go back to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from surefoot.protocol.checkpoints.completeness import complete_persistent
from surefoot.protocol.checkpoints.records import RankManifest
from surefoot.protocol.checkpoints.retention import last_good, proven, suspects
from surefoot.protocol.identities import Checkpoint
from surefoot_operator.policy.core.facts import (
    WorldFacts,
    WorldTierFacts,
    bad_of,
    is_responsive,
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
    persistent, epoch = facts.persistent, facts.world.epoch
    listed = (persistent.entries or ()) if persistent.read_epoch == epoch and not may_be_under_way(facts) else ()
    kept = complete_persistent(listed, facts.status.lineage, epoch, bad_of(facts), facts.covers)
    suspect = suspects(manifests) | suspects(listed)
    return proven((*complete, *kept), suspect, sound, facts.status.last_good)[0]


def spared(
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
    return kept | proven(complete, suspects(manifests), sound, facts.status.last_good)[1]


def spared_in_memory(
    facts: WorldFacts, complete: Sequence[Checkpoint], manifests: Sequence[RankManifest]
) -> frozenset[Checkpoint]:
    """What the memory tier keeps although newer ones are complete.

    As `spared`, and all that is not suspect while an agent may drop there, too.
    """
    kept = spared(facts, complete, manifests)
    if _keeps_house_alone(facts) or sound_steps(facts) is None:
        return kept
    return kept | frozenset(complete).difference(suspects(manifests))


def _keeps_house_alone(facts: WorldFacts) -> bool:
    """Whether the first member's agent drops nothing, as its line stands: without one it keeps house itself.

    It knows of later steps than are told here, and by them drops what counts as the last good one here, which drops what
    counts as that there.
    """
    first = next(iter(facts.world.members), None)
    session = facts.sessions.get(worker_id(first)) if first is not None else None
    if first is None or session is None or session.incarnation != first.incarnation:
        return first is None
    return is_responsive(facts, session) and facts.now >= session.since_seconds + DROP_SECONDS
